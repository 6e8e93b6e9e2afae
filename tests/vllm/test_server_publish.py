"""Every way of host memory to one real server: its generations have the log-probs of what was sent. Prints seconds as JSON:
of so small a model they are the cost of a publish beside its bytes."""

import asyncio
import json
from contextlib import aclosing

import numpy as np
import pytest
from vllm_fleet import ARCHITECTURE, TOLERANCE, log_probs, needs_vllm, sampler_config, servers, weights

from bridge.client import process
from bridge.client.errors import BadRequest
from bridge.client.publish import publish
from bridge.client.segments import run_id
from bridge.client.transports.choose import open_transport
from bridge.client.weights import Weights
from jaxrl.rollout.protocol import SamplingParams

pytestmark = [needs_vllm, pytest.mark.whole]
LIMIT = 240.0  # seconds, the start of the server included
PROMPT = [9, 8, 7, 6, 5, 4, 3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(scenario) awaits scenario(api, folder) within LIMIT."""
    folder, shared = tmp_path_factory.mktemp("publish"), tmp_path_factory.mktemp("shared")
    with asyncio.Runner() as runner:
        (launch,) = servers(folder, sampler_config(shared_folder=str(shared)))
        server = runner.run(asyncio.wait_for(process.start(launch), LIMIT))
        yield lambda scenario: runner.run(asyncio.wait_for(scenario(server.api, shared), LIMIT))
        runner.run(server.stop())


async def generate(api, name: str, count: int) -> tuple[list[int], list[float], set[int]]:
    """(ids, log-probs, versions) of a generation."""
    ids, logp, versions = [], [], set()
    async with aclosing(api.generate(name, PROMPT, SamplingParams(count))) as lines:
        async for line in lines:
            ids += line["ids"]
            logp += line["logp"]
            versions |= {version for version, _ in line["versions"]}
    return ids, logp, versions


@pytest.mark.parametrize("name, version", [("shm", 1), ("file", 3), ("http", 5)])
def test_what_was_sent_is_what_generates(run, name, version):
    async def scenario(api, shared):
        transport = await open_transport(name, await api.state(), run_id(shared), api=api, shared_folder=str(shared))
        for sent in (version, version + 1):  # the second finds everything made
            report = await publish(
                api,
                Weights(weights(sent)["params"], ARCHITECTURE, "float32"),
                sent,
                in_flight=True,
                cache="recompute",
                transport=transport,
                timeout=60.0,
            )
            ids, logp, versions = await generate(api, f"{name}-{sent}", 24)
            assert versions == {sent}
            assert np.abs(np.array(logp) - log_probs(sent, PROMPT, ids)).max() <= TOLERANCE
        transport.close()
        return report

    report = run(scenario)
    print(json.dumps({"transport": name, "bytes": report.num_bytes, "seconds": report.seconds}))


def test_a_server_tells_what_it_reads_of_its_folders_and_of_no_others(run, tmp_path):
    async def scenario(api, shared):
        (shared / "probe").write_text("token")
        assert await api.probe(str(shared / "probe"), "token")
        for token in ("toke", "token2", "other"):
            assert not await api.probe(str(shared / "probe"), token)
        with pytest.raises(BadRequest, match="nothing cannot be read here: No such file"):
            await api.probe(str(shared / "nothing"), "token")
        (tmp_path / "secret").write_text("token")
        (shared / "link").symlink_to(tmp_path / "secret")
        for path in (tmp_path / "secret", shared / ".." / tmp_path.name / "secret", shared / "link"):
            with pytest.raises(BadRequest, match="JAXRL_BRIDGE_FILES"):
                await api.probe(str(path), "token")

    run(scenario)
