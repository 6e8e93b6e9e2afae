"""A run's checkpoint becomes Hugging Face files with the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.checkpoint import Checkpoints
from jaxrl.config import LoraConfig
from jaxrl.export import main
from jaxrl.models.decoder import Decoder, init_variables
from jaxrl.models.hf import load_architecture, load_checkpoint
from jaxrl.models.peft import load_adapter, merge_lora
from jaxrl.trainer.state import TrainState

LORA = LoraConfig(rank=2, alpha=3, targets=("q_proj", "down_proj"))
SAVED = (1, 2, 3)
BEST = 2


def make_run(folder, stories, lora: LoraConfig | None, store_base: bool = False, param_dtype: str = "float32"):
    """The folder of a run with three checkpoints; returns the variables of each step."""
    folder.mkdir()
    adapter = f'\n[model.lora]\nrank = {lora.rank}\nalpha = {lora.alpha}\ntargets = ["q_proj", "down_proj"]\n' if lora else ""
    (folder / "config.toml").write_text(
        f'env = "sums"\n[model]\ncheckpoint = "{stories}"\nparam_dtype = "{param_dtype}"\n{adapter}'
    )
    architecture = load_architecture(stories)
    base = load_checkpoint(stories, architecture, None, param_dtype)
    variables = init_variables(Decoder(architecture, lora=lora), jax.random.key(0), None) if lora else {}
    start = variables["lora"] if lora else base
    by_step = {}
    checkpoints = Checkpoints(folder / "checkpoints", keep=5, keep_best=True)
    for step in SAVED:
        trained = jax.tree.map(lambda x, step=step: x + step / 64, start)
        state = TrainState(jnp.int32(step), trained, base if store_base else {}, optax.adam(1e-3).init(trained))
        checkpoints.save(step, state, {"seed": 0}, metric=-abs(step - BEST))
        by_step[step] = {"params": base, "lora": trained} if lora else {"params": trained}
    checkpoints.close()
    return by_step


def exported(folder, stories):
    return load_checkpoint(folder, load_architecture(stories), None, "float32")


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_full_model(stories, tmp_path, capsys):
    by_step = make_run(tmp_path / "run", stories, None)
    for name, flags, step in (("latest", [], 3), ("best", ["--best"], BEST), ("first", ["--step", "1"], 1)):
        assert main([str(tmp_path / "run"), str(tmp_path / name), *flags]) == 0
        assert f"step {step} " in capsys.readouterr().out
        assert_equal(exported(tmp_path / name, stories), by_step[step]["params"])
        assert load_architecture(tmp_path / name) == load_architecture(stories)
        assert (tmp_path / name / "tokenizer.json").read_bytes() == (stories / "tokenizer.json").read_bytes()
    assert main([str(tmp_path / "run"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert_equal(exported(tmp_path / "half", stories), jax.tree.map(lambda x: x.astype(jnp.bfloat16), by_step[3]["params"]))


@pytest.mark.parametrize("store_base", [True, False])
def test_adapters(stories, tmp_path, store_base):
    by_step = make_run(tmp_path / "run", stories, LORA, store_base)
    assert main([str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert_equal(exported(tmp_path / "merged", stories), merge_lora(by_step[3], LORA))
    assert main([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert_equal(load_adapter(tmp_path / "adapter", load_architecture(stories), LORA, None, "float32"), by_step[3]["lora"])


def test_what_cannot_be_exported_is_named(stories, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    assert main([str(run), str(out)]) == 2 and "no such file" in capsys.readouterr().err
    make_run(run, stories, None)
    for flags, says in ((["--step", "7"], "no step 7, it has 1, 2, 3"), (["--adapter"], "model.lora")):
        assert main([str(run), str(out), *flags]) == 2
        assert says in capsys.readouterr().err
    assert not out.exists()
    assert main([str(run), str(stories)]) == 2 and "already holds a model" in capsys.readouterr().err
    config = run / "config.toml"
    config.write_text(config.read_text().replace("float32", "bfloat16"))
    assert main([str(run), str(out)]) == 2 and "float32[512, 64] there and bfloat16" in capsys.readouterr().err
    (run / "checkpoints").rename(run / "elsewhere")
    assert main([str(run), str(out)]) == 2 and "no folder checkpoints" in capsys.readouterr().err
    (run / "checkpoints").mkdir()
    assert main([str(run), str(out)]) == 2 and "no complete checkpoint" in capsys.readouterr().err


@pytest.fixture
def stories(request):
    return request.config.rootpath / "tests" / "data" / "stories260K"


def test_a_float64_run_keeps_its_bits(stories, tmp_path):
    try:
        jax.config.update("jax_enable_x64", True)
        trained = make_run(tmp_path / "run", stories, None, param_dtype="float64")[3]
        jax.config.update("jax_enable_x64", False)
        assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
        out = load_checkpoint(tmp_path / "out", load_architecture(stories), None, "float64")
    finally:
        jax.config.update("jax_enable_x64", False)
    assert {x.dtype for x in jax.tree.leaves(out)} == {np.dtype("float64")}
    assert_equal(out, trained["params"])
