"""Makes a Hugging Face cache with one tokenizer, own/bytes, whose tokens are bytes: tokenizer.py DIR

aiperf takes no tokenizer from anywhere else without a network."""
import pathlib
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
repository, revision = pathlib.Path(sys.argv[1], "hub", "models--own--bytes"), "0" * 40
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(repository / "snapshots" / revision)
(repository / "refs").mkdir()
(repository / "refs" / "main").write_text(revision)
