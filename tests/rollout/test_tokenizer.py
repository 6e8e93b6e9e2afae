"""Tokenizer folders: increments and texts from the middle of a sequence, end-of-sequence ids, errors that name the key."""

import json
import shutil

import pytest
from scripted import save_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers

from jaxrl.config import ConfigError
from jaxrl.rollout.tokenizer import check_vocabulary, eos_token_ids, load_tokenizer


def save_sentencepiece(folder):
    """Like Llama 2's: a space before every text, stripped from every decoded one, bytes as a fallback, BOS."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6, "ab": 7} | {
        f"<0x{i:02X}>": 8 + i for i in range(256)
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )
    return folder


def test_a_space_is_put_before_the_first_text_only(tmp_path):
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path / "t"))
    assert tokenizer.encode("ab", start=True) == [6, 5]  # " a", "b"
    assert tokenizer.encode("ab", start=False) == [7]
    assert tokenizer.encode(" ab", start=False) == [6, 5]
    assert tokenizer.decode([6, 5]) == " ab" and tokenizer.decode([7]) == "ab"
    assert tokenizer.decode([7, 2]) == "ab" and tokenizer.decode([7, 2], special=True) == "ab</s>"
    assert tokenizer.encode("", start=True) == []


def test_byte_level_text_comes_back_from_anywhere(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, "smollm2"))
    for text in ("four", " four", "\n\nfour ", "<|im_end|>\n<|im_start|>user\n", "naïve 東京"):
        for start in (True, False):
            assert tokenizer.decode(tokenizer.encode(text, start=start), special=True) == text


def test_eos_ids_come_from_every_source(tmp_path):
    folder = save_tokenizer(tmp_path / "t", "qwen3")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    tokenizer = load_tokenizer(folder)
    assert eos_token_ids(tokenizer) == (0, 2)  # the tokenizer's, and the one that ends a turn
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for eos, expected in ((7, (0, 2, 7)), ([0, 9], (0, 2, 9)), (None, (0, 2))):
        (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert eos_token_ids(tokenizer, checkpoint) == expected


def test_no_eos_is_an_error(tmp_path):
    folder = save_tokenizer(tmp_path, None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ConfigError, match="model.tokenizer.*eos_token"):
        eos_token_ids(load_tokenizer(folder))


def test_errors_name_the_key(tmp_path):
    folder = save_tokenizer(tmp_path / "t", None)
    with pytest.raises(ConfigError, match="model.tokenizer.*no such folder"):
        load_tokenizer(tmp_path / "missing")
    tokenizer = load_tokenizer(folder)
    size = len(tokenizer.hf)
    check_vocabulary(tokenizer, size)
    with pytest.raises(ConfigError, match=f"model.tokenizer.*goes up to id {size - 1}.*vocab_size is {size - 1}"):
        check_vocabulary(tokenizer, size - 1)
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="model.tokenizer.*does not load"):
        load_tokenizer(broken)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="model.tokenizer.*no tokenizer.json"):
        load_tokenizer(broken)
