"""The command: what it prints and how it exits."""

import json
import runpy
import sys

import pytest
from test_run import make_config

from jaxrl.pipeline.run_folder import lock, open_run
from jaxrl.train import main


def command(tmp_path, task, *words, **tables) -> list[str]:
    from jaxrl.pipeline.run_folder import to_toml

    file = tmp_path / "config.toml"
    file.write_text(to_toml(make_config(tmp_path, task, **tables).model_dump(exclude_none=True)))
    return [str(file), *words]


def test_the_last_line_of_a_finished_run_is_json(tmp_path, capsys):
    sft = tmp_path / "traces.jsonl"
    sft.write_text('{"prompt": "1=", "completion": "777"}\n{"prompt": "2=", "completion": "77"}\n')
    words = ["--pipeline.steps", "2", "--sft.data", str(sft), "--sft.steps", "12", "--sft.batch_size", "4", "--sft.lr", "0.03"]
    assert main(command(tmp_path, "sevens", *words, "--eval.num_tasks", "4")) == 0
    out = capsys.readouterr().out.splitlines()
    summary = json.loads(out[-1])
    assert summary["steps"] == 2 and summary["heldout_after"] is not None and summary["seconds"] > 0
    assert summary["heldout_before"] > 0.3  # the traces were learned
    assert any("warm start 12/12" in line for line in out) and any("step 2/2" in line for line in out)


@pytest.mark.parametrize(
    "words, key",
    [
        (["--mesh.fsdp", "3"], "mesh"),
        (["--packing.rows", "3"], "packing.rows"),
        (["--model.checkpoint", "/no/such"], "model"),
        (["--sft.data", "/no/such.jsonl"], "sft.data"),
        (["--env.name", "poetry"], "env.name"),
        (["--env.workers", "none"], "env.workers"),
    ],
)
def test_what_cannot_work_is_one_line_that_names_the_key(tmp_path, capsys, words, key):
    assert main(command(tmp_path, "sevens", *words)) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and f"`{key}" in error[0]


def test_help_needs_no_config(capsys):
    assert main(["--help"]) == 0
    assert "--optimizer.lr FLOAT" in capsys.readouterr().out
    assert main([]) == 2


def test_a_signal_before_the_run_takes_them_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxrl.pipeline.command_line.read_command", interrupted)
    monkeypatch.delitem(sys.modules, "jaxrl.train")
    with pytest.raises(SystemExit, match="130"):
        runpy.run_module("jaxrl.train", run_name="__main__")
    assert capsys.readouterr().err.count("\n") == 1


def test_two_processes_do_not_share_a_folder(tmp_path, capsys):
    folder = open_run(make_config(tmp_path, "sevens"))
    config = (folder / "config.toml").read_bytes()
    with lock(folder):
        assert main(command(tmp_path, "sevens", "--pipeline.steps", "77")) == 2
    assert (folder / "config.toml").read_bytes() == config
    assert "another process runs in" in capsys.readouterr().err
