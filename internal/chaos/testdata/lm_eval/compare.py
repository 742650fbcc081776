"""Compares two runs of lm-eval, every score and every answer: compare.py RUN RUN"""
import glob
import json
import sys


def read(run):
    results = json.load(open(glob.glob(f"{run}/**/results_*.json", recursive=True)[0]))["results"]
    samples = {}
    for name in sorted(glob.glob(f"{run}/**/samples_*.jsonl", recursive=True)):
        for line in open(name):
            s = json.loads(line)
            samples[s["doc_hash"]] = s["resps"]
    return results, samples


(a, sa), (b, sb) = read(sys.argv[1]), read(sys.argv[2])
assert len(sa) == 24, f"{len(sa)} questions were answered, not 24"
assert sa == sb, [(k, sa[k], sb.get(k)) for k in sa if sa[k] != sb.get(k)][:3]
for task in a:
    scores = {k: v for k, v in a[task].items() if isinstance(v, float)}
    assert scores == {k: v for k, v in b[task].items() if isinstance(v, float)}, (a[task], b[task])
    print(task, scores)
print(f"serve and up agree on {len(sa)} questions, bit for bit")
