"""Traces that cannot be learned from are named before anything is loaded."""

import json

import pytest
from test_run import make_config

from jaxrl.config import ConfigError
from jaxrl.pipeline.setup import build
from jaxrl.pipeline.warm_start import read_traces

GOOD = {"prompt": "1+1=", "completion": "2"}


@pytest.mark.parametrize(
    ("trace", "packing", "message"),
    [
        ({"prompt": 1, "completion": "2"}, {}, "`prompt` is 1, it must be a text"),
        ({"prompt": "1", "completion": None}, {}, "`completion` is None"),
        ({"prompt": "", "completion": ""}, {}, "nothing to learn"),
        ({"messages": "hi"}, {}, "`messages` must be a list"),
        ({"messages": [1]}, {}, "`messages` must be a list"),
        ({"messages": [{"role": "assistant", "content": "2"}]}, {}, "no chat template"),
        ({"text": "1+1=2"}, {}, "neither `messages` nor"),
        ({"prompt": "1=", "completion": "7" * 70}, {}, "73 tokens, a row holds 64: raise packing.row_length"),
        (
            {"prompt": "1=", "completion": "7" * 30},
            {"reads": 20},
            "31 trainable tokens, a row holds 20 reads: raise packing.reads",
        ),
        (
            {"prompt": "1=", "completion": "7" * 30},
            {"terms": 20},
            "31 trainable tokens, a row holds 20 terms: raise packing.terms",
        ),
        ({"prompt": "1=", "completion": "7" * 70}, {"row_length": 128}, "73 tokens, the model's positions end at 64"),
    ],
)
def test_a_bad_trace_is_named(tmp_path, trace, packing, message):
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps(trace) + "\n")
    parts = build(make_config(tmp_path, "sevens", sft={"data": str(file)}, packing=packing))
    with pytest.raises(ConfigError, match=f"`sft.data`: {file}, trace 2.*{message}"):
        read_traces(parts)
