#!/usr/bin/env python3
"""A small byte-level BPE tokenizer, and the ids that Hugging Face's tokenizers gives with it.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install tokenizers==0.23.3
    /tmp/venv/bin/python tests/golden/tokenizer.py

tokenizer_pair/{vocab.json,merges.txt}   256 bytes and the merges below
tokenizer.json                           the same with added tokens; merges are written as pairs
tokenizer.txt                            arrays, which tests/golden.h reads:
    count               of texts
    text.N              the bytes of a text, not all UTF-8: Python's errors="replace" reads them
    pair.N              ids by vocab.json and merges.txt
    json.N              ids by tokenizer.json
    split.N             ids by tokenizer.json after two changes: its text is cut by the pattern SPLIT (that of
                        Llama 3), and words that are tokens need no merges
"""
import json
import os

from tokenizers import AddedToken, ByteLevelBPETokenizer, Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = os.path.dirname(os.path.abspath(__file__))

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")

# As merges.txt has them: "Ġ" is a space, "Ċ" a newline, "Ã" and "©" are the bytes of "é".
MERGES = (
    "Ġ Ġ|t h|Ġ th|r e|Ġth e|ĠĠ Ġ|t e|a t|Ġ s|Ġ re|th e|Ġth at|Ã ©|Ġ 1|Ġ i|the re|Ġthe re|a n|n s|o r|t u|v e|"
    "Ċ ĠĠ|Ċ ĠĠĠ|Ġ w|Ġ te|Ġ an|ĠĠ ĠĠĠ|te p|Ġs a|Ġs tep|Ġre tu|Ġ1 2|ns or|Ġte nsor|Ġan d|r n|Ġretu rn|' l|'l l|"
    "' s|' re|' ve|0 2|2 02|3 4|= =|== ==|a d|a f|c af|caf Ã©|e l|i d|o te|r ote|s e|s t|t Ã©|Ð ¸|Ð ¿|Ñ Ģ|"
    "Ġ x|Ġ Ã©|Ġ 202|ä ½|ä½ ł|¥ ½|å ¥½|ð Ł|ðŁ ĳ"
)

TEXTS = [
    b"the tensor that we'll keep",
    b"",
    b" ",
    b"   ",
    b"a   b  c \n\n\t x\r\n  y   ",
    b"it's 'tis they're WE'LL 's 'S ''s '' 've'd 'lla 'l' ' d",
    b"in 1234567 of 12.5e-3, x1y22z333",
    "\u00e9t\u00e9 e\u0301te\u0301 \u00c5 A\u030a a\u0316\u0300 \u212b".encode(),
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e \u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4".encode(),
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f44d\U0001f3fd!".encode(),
    "\u043f\u0440\u0438\u0432\u0435\u0442\u05e9\u05dc\u05d5\u05dd abc\u0661\u0662 \u0967\u0968 \u00bd\u00b2 \u2167 "
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e17\u0e35\u0e48".encode(),
    "a\u00a0b\u3000\u3000c\u200bd\u0085\u0085e\u2028f\u202f g\ufeff".encode(),
    b"<|end|>the<|end|><|en<|end|>  x   <|end|",
    b"     five      six       seven and <|end|>     five",
    b"\xff\xfe bad \xc3( \xe2\x82 cut \xf0\x9f\x98 \xed\xa0\x80 \xc0\xaf \xf4\x90\x80\x80 \xe0\x80 ok\xe2",
    b"x\x00\x01\x7f\x1c\x1fy" + b"=" * 40 + b"the" * 30 + b" " * 40 + b"!",
    "m\u180en\u180e\u180e \u180e".encode(),
]


def make():
    vocabulary = {token: id for id, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [tuple(merge.split(" ")) for merge in MERGES.split("|")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def put(lines, name, values):
    lines.append(" ".join([name, str(len(values)), *map(str, values)]))


def main():
    tokenizer = make()
    folder = os.path.join(HERE, "tokenizer_pair")
    os.makedirs(folder, exist_ok=True)
    tokenizer.model.save(folder)
    pair = ByteLevelBPETokenizer(os.path.join(folder, "vocab.json"), os.path.join(folder, "merges.txt"))

    # An early token within a late one's reach, and late ones of which the longest must win.
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in (5, 6, 3)])
    path = os.path.join(HERE, "tokenizer.json")
    with open(path, "w") as f:
        json.dump(json.loads(tokenizer.to_str()), f, separators=(",", ":"))
        f.write("\n")

    changed = json.loads(tokenizer.to_str())
    changed["model"]["ignore_merges"] = True
    split = Tokenizer.from_str(json.dumps(changed))
    split.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    lines = [f"count - {len(TEXTS)}"]
    for n, data in enumerate(TEXTS):
        text = data.decode("utf-8", errors="replace")
        put(lines, f"text.{n}", data)
        put(lines, f"pair.{n}", pair.encode(text).ids)
        put(lines, f"json.{n}", tokenizer.encode(text).ids)
        put(lines, f"split.{n}", split.encode(text).ids)
    with open(os.path.join(HERE, "tokenizer.txt"), "w") as f:
        f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
