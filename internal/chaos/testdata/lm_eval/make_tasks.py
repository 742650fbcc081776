"""Writes a small task of our own making for lm-eval into a directory: make_tasks.py DIRECTORY

Two tasks over local JSON lines: multiple choice, scored by the log-probabilities of the answers (echo, logprobs 1), and
generation up to a stop string. Questions are sums and opposites; nothing comes from a hub.
"""
import json
import os
import sys

out = sys.argv[1]
os.makedirs(out, exist_ok=True)
opposites = [("hot", "cold"), ("big", "small"), ("up", "down"), ("old", "new"), ("day", "night"), ("yes", "no"), ("open", "closed"), ("fast", "slow")]
with open(f"{out}/choice.jsonl", "w") as f:
    for i, (a, b) in enumerate(opposites):
        wrong = [opposites[(i + k) % len(opposites)][1] for k in (1, 2, 3)]
        choices = wrong[: i % 4] + [b] + wrong[i % 4 :]
        f.write(json.dumps({"question": f"The opposite of {a} is", "choices": choices, "gold": i % 4}) + "\n")
    for a in range(2, 10):
        choices = [str(2 * a + k) for k in (-1, 0, 1, 10)]
        f.write(json.dumps({"question": f"{a} + {a} =", "choices": choices, "gold": 1}) + "\n")
with open(f"{out}/words.jsonl", "w") as f:
    for a, b in opposites:
        f.write(json.dumps({"question": f"Question: What is the opposite of {a}?\nAnswer:", "answer": b}) + "\n")

common = "dataset_path: json\ntest_split: test\nmetadata:\n  version: 1.0\n"
with open(f"{out}/own_choice.yaml", "w") as f:
    f.write("task: own_choice\n" + common + f"""dataset_kwargs:
  data_files:
    test: {out}/choice.jsonl
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: " "
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
""")
with open(f"{out}/own_words.yaml", "w") as f:
    f.write("task: own_words\n" + common + f"""dataset_kwargs:
  data_files:
    test: {out}/words.jsonl
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n", "Question:"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
""")
