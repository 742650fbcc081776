"""Writes reference.json: small vocabularies, texts, and the tokens that llama.cpp makes of each text with each vocabulary.

    scripts/llamacpp/references.sh tokenizers

By hand; tests read only what it wrote. No model's vocabulary is used but tiny's: the others are trained here, on the texts
themselves, small and the same at every run. The byte-level one is one for all pre-tokenizers: some of its merges reach over
the ends of words, so that a text that is cut at another place gives other tokens. Each pre-tokenizer is also run here as
what it is, a regular expression and merges one by one: llama.cpp must agree with that, too.
"""
import collections
import json
import random
import struct
import sys
import tempfile
from pathlib import Path

import llama_cpp
import regex

HERE = Path(__file__).parent
TINY = HERE / "../../internal/model/tiny-q8_0.gguf"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"gpt-2": GPT2, "smollm": GPT2, "llama-bpe": LLAMA3, "qwen2": LLAMA3.replace("{1,3}", "")}

LANGUAGES = """
The quick brown fox jumps over the lazy dog; it didn't ask why.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.
Dès Noël, où un zéphyr haï me vêt de glaçons würmiens, je dîne d'exquis rôtis.
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia; ¿y qué? ¡Nada!
Pchnąć w tę łódź jeża lub ośm skrzyń fig.
Pijamalı hasta yağız şoföre çabucak güvendi. İstanbul'un ışıkları
Съешь же ещё этих мягких французских булок, да выпей чаю.
Жебракують філософи при ґанку церкви в Гадячі, ще й шатро їхнє п'яне знаємо.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, έτσι δεν είναι;
דג סקרן שט בים מאוכזב ולפתע מצא חברה. שָׁלוֹם
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر، ١٢٣٤٥.
همهٔ انسان‌ها آزاد به دنیا می‌آیند؛ ۴۵۶۷
सभी मनुष्य जन्म से स्वतंत्र हैं। १२३४ क्षत्रिय
সমস্ত মানুষ স্বাধীনভাবে জন্মগ্রহণ করে। ৫৬৭
எல்லா மனிதரும் சுதந்திரமாகப் பிறக்கிறார்கள். ௧௨௩
มนุษย์ทั้งหลายเกิดมามีอิสระ ๑๒๓ บาท
ມະນຸດທຸກຄົນເກີດມາມີສິດເສລີ
មនុស្សទាំងអស់កើតមកមានសេរីភាព ១២៣
ყველა ადამიანი იბადება თავისუფალი.
Բոլոր մարդիկ ծնվում են ազատ։
የሰው ልጅ ሁሉ ሲወለድ ነጻ ነው። ፲፪
人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心。
すべての人間は、生まれながらにして自由であり、ﾊﾝｶｸも。
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.
Tất cả mọi người sinh ra đều được tự do và bình đẳng.
Хүн бүр төрж мэндлэхэд эрх чөлөөтэй ᠮᠣᠩᠭᠣᠯ
ᏂᎦᏓ ᎠᏂᏴᏫ ᏂᎨᎫᏓᎸᎾ
𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒶𝓃𝒹 𝟙𝟚𝟛 𐌰𐌱𐌲 𠀀𠀁 𞤀𞤁
""".strip("\n").split("\n")

CODE = [
    "def f(x, *, y=None):\n    \"\"\"Doc.\"\"\"\n    return [i**2 for i in range(x) if i % 2 == 0] or y\n",
    "func main() {\n\tfor i := 0; i < 10; i++ {\n\t\tfmt.Printf(\"%d\\n\", i)\n\t}\n}\n",
    "#include <stdio.h>\r\nint main(void)\r\n{\r\n    return printf(\"hi\\r\\n\") != 4;\r\n}\r\n",
    "<!doctype html>\n<p class=\"a b\" data-x='1'>x &amp; y<br/></p>\n<!-- c -->",
    "{\"a\": [1, 2.5, -3e10, null, true], \"b\": {\"c\": \"d\\u00e9\"}}",
    "SELECT u.name, COUNT(*) FROM users u WHERE u.id >= 100 GROUP BY 1 HAVING COUNT(*)>3;",
    "for f in *.txt; do sed -i 's/foo/bar/g' \"$f\" && echo \"$f: ok\" || exit 1; done 2>/dev/null",
    "\\begin{equation}\n  e^{i\\pi} + 1 = 0 \\quad\\text{(Euler)}\n\\end{equation}",
    "--- a/x.go\n+++ b/x.go\n@@ -1,3 +1,4 @@\n-old\n+new\n ctx\n\n\n",
    "key: value\nlist:\n  - a\n  - b: 1\n    c: 2\n\t# tab\n",
    "let x = &mut v[..]; match x { Some(_) => 0x1F_u8, None => b'\\'' }",
    "| a | b |\n|---|---|\n| 1 | *2* |\n\n## Head\n\n1. one\n2. two\n```go\nx\n```",
    "\t\tif (a&&b||!c) {\n\t\t\treturn;\t// why?\n\t\t}\n\n\n\t}",
    "PYTHONPATH=. python3 -m unittest -v tests.test_x::TestY 1>&2 | tee log.$(date +%s)",
    "    four\n        eight\n            twelve\n  two\n three",
]

PLACES = [
    "https://example.org:8080/a/b%20c?x=1&y=%C3%A9#frag", "mailto:first.last+tag@sub.example.co.uk", "C:\\Users\\me\\file (1).txt",
    "/usr/local/lib/python3.12/site-packages/x.py:42", "550e8400-e29b-41d4-a716-446655440000", "192.168.0.1/24 fe80::1%eth0",
    "SGVsbG8sIFdvcmxkIQ==", "git@github.com:o/r.git", "2024-05-17T12:34:56.789Z", "+49 (0)30 1234-567", "v1.2.3-rc.4+build.5",
    "#hashtag @user $AAPL €9,99 £5 ¥100 50% ±3° 10µm", "a/b\\c|d:e;f,g.h", "...and... so—on – “quoted” ‘single’ «guillemets»", "!!!???!?!...--==++**",
]

EMOJI = [
    "😀😃😄", "👨‍👩‍👧‍👦 family", "👩🏽‍💻 codes", "🏳️‍🌈🏴‍☠️", "🇩🇪🇫🇷🇯🇵 flags", "1️⃣2️⃣#️⃣*️⃣", "❤️ ❤ ☺︎", "👍🏿👍🏻 ok", "🧑‍🚀🚀", "a😀b 😀c\n😀", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "¯\\_(ツ)_/¯ ಠ_ಠ",
]

MARKS = [
    "e\u0301 E\u0301 n\u0303", "Vie\u0323\u0302t", "z\u0335\u0321a\u0335\u0322l\u0334g\u0338o\u0337", "\u0301alone", " \u0301 \u0301x", "क\u094dष\u093f", "a\u20dd b\u0489",
    "\u0e01\u0e33\u0e49", "أَبْجَد", "q\u0307\u0323 q\u0323\u0307", "1\u0301 2\u20e3", "'\u0301s '\u0301S",
]

DIGITS = [
    "1", "12", "123", "1234", "12345", "123456", "1234567890123", "a1b22c333d4444", "1,234,567.89", "3.14159", "0x1F 0b101 1e-9", "٣٤٥٦", "१२३४५", "３４５６７",
    "½ ⅓ ¾ x² y³ ₁₂", "Ⅻ ⅷ ①②③ ㊿", "1 2  3   4", " 1 12 123 1234", "1st 2nd 3rd 10th", "9" * 31, "1٢३４", "二〇二四年", "𝟏𝟐𝟑𝟒", "-1 +1 ~1 1-1", "1\n2\n\n3\r\n4",
]

SPACES = [" ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "\v", "\f", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"]
NO_SPACES = ["\u200b", "\u200d", "\ufeff", "\u2060", "\x1c", "\x1f", "\u180e"]

SPECIALS = [
    "<|im_end|>", "a<|im_end|>b", "<|im_end|><|begin|>", " <|im_end|> ", "<|im_end|", "<<|im_end|>>", "<|im_end|>\n<|begin|>user\nhi<|im_end|>", "<tool_call>", "x <tool_call>{}</tool_call> y",
    "<tool_call><tool_call>", "<tool_call", "«é»", "a«é»b «é» c", "two  words", "<unk>", "<s>[INST] hi [/INST]</s>", "</s>", "[INST]", "<|endoftext|>1 <|endoftext|>", "it's<|im_end|>'s",
]

EDGES = [
    "", " ", "a", "\U0002ebf0\U0002ee5d x\U0002ebf1", "\u0378\u0379", "\ue000\uf8ff", "\U0010ffff\ufffe", "\ufffd", "\u2581", "\u2581a \u2581 b", "a\u2581b\u2581\u2581c", "<0x0A>", "\u00ad\u00b7", "İıſKÅ",
    "'ſx 'ſ", "ǅǈ ﬁﬂ", "ªº", "ﷺ", "ꙮ", "\U000e0001\U000e0041",
]


def contractions(r):
    ends = ["s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "VE", "M", "LL", "D", "Re", "rE", "vE", "Ll", "lL"]
    out = [" ".join("we'" + e for e in ends), "".join("'" + e for e in ends), " ".join("’" + e for e in ends), "'" + "' '".join(ends), "\n'".join(ends)]
    for _ in range(20):
        out.append("".join(r.choice(["I", "you", "WE", " they", "é", "1", " ", "'", "''", "\n", "!"]) + "'" + r.choice(ends) + r.choice(["", "", "x", "1", " ", "'"]) for _ in range(4)))
    return out


def texts():
    r = random.Random(1)
    out = EDGES + LANGUAGES + CODE + PLACES + EMOJI + MARKS + DIGITS + SPECIALS + contractions(r)
    for s in SPACES + NO_SPACES:
        out.append(s + "a" + s + s + "b1" + s + "2" + s + "!" + s + s)
    for _ in range(40):
        out.append("".join(r.choice(SPACES + NO_SPACES[:1] + ["\n", " ", " "]) * r.choice([1, 1, 1, 2, 5]) + r.choice(["", "a", "Ab", "1", "23", "!", "é", "'s", "漢", "_x"]) for _ in range(6)))
    for lo in (0, 8, 16, 24, 0x7f, 0x88, 0x98):
        out.append("".join(f"{chr(c)}a{chr(c)}{chr(c)}1" for c in range(lo, lo + 8)))
    out += ["a" * 300, "ab" * 150, "Donaudampfschifffahrtsgesellschaft" * 6, "=" * 100, "-" * 37 + "\n", " " * 150, " " * 37 + "x", "\n" * 60, "\t" * 20 + "\n" * 3 + " " * 9 + "y",
            "漢" * 64, "😀" * 40, "é" * 90, "'" * 30, "'s" * 30, "_a" * 40, "".join(r.choice("abcdeXYZ019_-") for _ in range(400)), "".join(chr(r.randrange(0x400, 0x460)) for _ in range(150))]
    pool = [w for line in LANGUAGES for w in line.split()] + CODE[:6] + PLACES + EMOJI + MARKS + DIGITS + SPACES * 3 + ["'s", "'LL", "'t", ",", ".", "(", ")", "\"", "\n", " ", " ", " ", " "]
    for _ in range(60):
        out.append("".join(r.choice(pool) + r.choice(["", " ", "", "\n", "  "]) for _ in range(r.randrange(2, 9))))
    for _ in range(20):
        out.append("".join(chr(r.choice([r.randrange(1, 0x250), r.randrange(0x250, 0xd800), r.randrange(0xe000, 0x10000), r.randrange(0x10000, 0x20000)])) for _ in range(12)))
    return out


def split(pre, text):
    if pre != "smollm":
        return [m.group() for m in regex.finditer(PATTERNS[pre], text)]
    return [w for part in regex.split(r"(\p{N})", text) for w in ([part] if regex.fullmatch(r"\p{N}", part) else split("gpt-2", part))]


def train(words, count):
    """The merges of byte-pair encoding (Sennrich et al., 2016): always the most frequent pair, ties by the pair itself."""
    parts = {w: list(w) for w in words}
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for w, p in parts.items():
        for pair in zip(p, p[1:]):
            pairs[pair] += words[w]
            where[pair].add(w)
    merges = []
    while len(merges) < count:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for w in list(where[best]):
            p = parts[w]
            for pair in zip(p, p[1:]):
                pairs[pair] -= words[w]
            i, joined = 0, []
            while i < len(p):
                if tuple(p[i:i + 2]) == best:
                    joined.append(p[i] + p[i + 1])
                    i += 2
                else:
                    joined.append(p[i])
                    i += 1
            parts[w] = joined
            for pair in zip(joined, joined[1:]):
                pairs[pair] += words[w]
                where[pair].add(w)
        del pairs[best]
    return merges


def alphabet():
    """GPT-2's spelling of bytes."""
    plain = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    extra = iter(range(256, 512))
    return {b: chr(b) if b in plain else chr(next(extra)) for b in range(256)}


SPELL = alphabet()


def spell(text):
    return "".join(SPELL[b] for b in text.encode())


def byte_vocab(all_texts):
    words = collections.Counter()
    r = random.Random(2)
    for t in all_texts:
        if len(t) > 500:
            continue
        for pre in PATTERNS:
            words.update(spell(w) for w in split(pre, t) if len(w) < 40)
        for _ in range(len(t) // 8):
            at = r.randrange(len(t))
            words[spell(t[at:at + 8])] += 2
    merges = train(words, 1500)
    tokens = ["<|endoftext|>", "<|begin|>", "<|im_end|>", "<tool_call>", "</tool_call>", "«é»", "two  words", "[unused]"]
    types = [3, 3, 3, 4, 4, 4, 4, 5]
    tokens += [SPELL[b] for b in range(256) if b not in (0x04, 0x1d, 0xc0, 0xf5)]
    tokens += [a + b for a, b in merges]
    seen, unique = set(), []
    for t in tokens:
        if t not in seen:
            unique.append(t)
        seen.add(t)
    tokens = unique
    # Words that no merge makes: only a pre-tokenizer that takes whole words finds them.
    whole = sorted({spell(w) for t in all_texts for w in split("llama-bpe", t) if 3 < len(w) < 20} - set(tokens))
    tokens += r.sample(whole, 120)
    return {"tokens": tokens, "types": types + [1] * (len(tokens) - len(types)), "merges": [f"{a} {b}" for a, b in merges]}


def piece_vocab(all_texts):
    words = collections.Counter()
    for t in all_texts:
        if len(t) < 500:
            words.update(w for w in regex.findall("▁*[^▁]*", t.replace(" ", "▁")) if 0 < len(w) < 40)
    chars = collections.Counter(c for w in words for c in w)
    merges = train(words, 900)
    tokens, types = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|im_end|>"], [2, 3, 3, 4, 3, 3]
    scores = [0.0] * 6
    for b in range(256):
        tokens, types, scores = tokens + [f"<0x{b:02X}>"], types + [6], scores + [0.0]
    kept = sorted(c for c, n in chars.items() if n > 3)
    for i, t in enumerate([a + b for a, b in merges] + kept):
        # A piece that is the beginning of a control token would let llama.cpp merge on to it; a pair of merges with one score is a tie.
        if t not in tokens and not any(c.startswith(t) and len(t) > 1 for c in ("<unk>", "<s>", "</s>", "[/INST]", "<|im_end|>")):
            tokens, types, scores = tokens + [t], types + [1], scores + [-float(i - i % 3)]
    return {"tokens": tokens, "types": types, "scores": scores}


def gguf(path, keys):
    """Writes a file without tensors: strings, ints, bools, and lists of strings, ints or floats."""
    def text(s):
        b = s.encode()
        return struct.pack("<Q", len(b)) + b

    def value(v):
        if isinstance(v, str):
            return struct.pack("<I", 8) + text(v)
        if isinstance(v, bool):
            return struct.pack("<IB", 7, v)
        if isinstance(v, int):
            return struct.pack("<II", 4, v)
        if isinstance(v, float):
            return struct.pack("<If", 6, v)
        kind = {str: 8, int: 5, float: 6}[type(v[0])]
        items = b"".join(text(x) if kind == 8 else struct.pack("<i" if kind == 5 else "<f", x) for x in v)
        return struct.pack("<IIQ", 9, kind, len(v)) + items

    body = b"".join(text(k) + value(v) for k, v in keys.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + body)


def common(vocab):
    return {"general.architecture": "llama", "llama.context_length": 512, "llama.embedding_length": 64, "llama.block_count": 1, "llama.feed_forward_length": 64,
            "llama.attention.head_count": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.tokens": vocab["tokens"], "tokenizer.ggml.token_type": vocab["types"]}


def literal(vocab, pre, text):
    """Byte-level BPE as it reads: cut by the pattern, then merge the pair of lowest rank until there is none."""
    ids = {t: i for i, t in enumerate(vocab["tokens"]) if vocab["types"][i] == 1}
    rank = {tuple(m.split(" ")): i for i, m in reversed(list(enumerate(vocab["merges"])))}
    out = []
    for word in split(pre, text):
        parts = list(spell(word))
        if pre == "llama-bpe" and spell(word) in ids:
            parts = [spell(word)]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: rank.get((parts[i], parts[i + 1]), 1 << 30))
            if (parts[best], parts[best + 1]) not in rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        for p in parts:
            out += [ids[p]] if p in ids else [ids[b] for b in p if b in ids]
    return out


def run(name, path, keys, all_texts):
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    out = {"name": name, "keys": keys, "ids": [], "special": {}}
    for i, t in enumerate(all_texts):
        out["ids"].append(model.tokenize(t.encode(), add_bos=True, special=False) if t else model.tokenize(b"", add_bos=True))
        special = model.tokenize(t.encode(), add_bos=True, special=True)
        if special != out["ids"][-1]:
            out["special"][str(i)] = special
    return out


def main():
    all_texts = texts()
    assert len(all_texts) >= 300 and all(t == t.encode().decode() for t in all_texts)
    vocabs = {"bytes": byte_vocab(all_texts), "pieces": piece_vocab(all_texts)}
    runs = []
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "vocab.gguf"
        for pre in PATTERNS:
            v = vocabs["bytes"]
            keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
            gguf(path, {**common(v), **keys, "tokenizer.ggml.merges": v["merges"]})
            r = run(pre, path, keys, all_texts)
            bos = [1] if pre == "llama-bpe" else []
            defined = [t for t, k in zip(v["tokens"], v["types"]) if k == 4]
            departures = [t for t, ids in zip(all_texts, r["ids"]) if not any(d in t for d in defined) and bos + literal(v, pre, t) != ids]
            assert not departures, (pre, departures)
            runs.append({**r, "vocab": "bytes"})
        v = vocabs["pieces"]
        for name, keys in (("pieces", {}), ("pieces without a space in front", {"tokenizer.ggml.add_space_prefix": False})):
            keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, **keys}
            gguf(path, {**common(v), **keys, "tokenizer.ggml.scores": v["scores"]})
            runs.append({**run(name, path, keys, all_texts), "vocab": "pieces"})
        runs.append({**run("tiny", TINY, {}, all_texts), "vocab": ""})
    lines = {"about": __doc__.split("\n")[0], "engine": "llama-cpp-python " + llama_cpp.__version__, "texts": all_texts, "vocabs": vocabs}
    body = ",\n".join(json.dumps(k) + ": " + json.dumps(x, separators=(",", ":")) for k, x in lines.items())
    body += ',\n"runs": [\n' + ",\n".join(json.dumps(x, separators=(",", ":")) for x in runs) + "\n]"
    (HERE / "reference.json").write_text("{\n" + body + "\n}\n")
    print(len(all_texts), "texts;", {k: len(v["tokens"]) for k, v in vocabs.items()}, file=sys.stderr)


main()
