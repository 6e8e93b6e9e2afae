"""Two real servers as one fleet: publishes that roll, prefixes that are found again, generations that outlive a server."""

import asyncio
import re

import httpx
import pytest
from vllm_fleet import KEY, Generation, RealFleet, kill, needs_vllm, processes, sampler_config, servers, weights

pytestmark = [needs_vllm, pytest.mark.whole]
LIMIT = 240.0  # seconds of a test on a busy machine


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """(run, fleet): runs a coroutine on the fleet's event loop."""
    folder = tmp_path_factory.mktemp("replicas")
    config = sampler_config(replicas=2, transport="shm")
    launches = servers(folder, config)
    fleet = RealFleet(launches, config, folder)
    fleet.launches = launches
    with asyncio.Runner() as runner:

        def run(test):
            async def limited():
                async with asyncio.timeout(LIMIT):
                    return await test

            return runner.run(limited())

        try:
            run(start(fleet))
            yield run, fleet
        finally:
            runner.run(fleet.fleet.close())
            assert not any(processes(launch) for launch in launches)


async def start(fleet: RealFleet) -> None:
    await fleet.start()
    first = [Generation(fleet, [i, 4, 4], 50) for i in range(16)]  # a server takes seconds for its first batch
    await asyncio.gather(*(generation.task for generation in first))


def hits(fleet: RealFleet) -> list[float]:
    """Prompt tokens that each server has found in its cache."""
    found = []
    for replica in fleet.fleet._replicas:
        text = httpx.get(replica.name + "/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        found.append(float(re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)", text, re.M)[1]))
    return found


def test_publishes_roll_over_running_generations(setting):
    run, fleet = setting

    async def test():
        for version in (2, 3, 4):
            weights(version)  # made before: it may take longer than the generations
        generations = [Generation(fleet, [i, 1, 2], 1800) for i in range(16)]
        while sum(replica.num_open for replica in fleet.fleet._replicas) < 16:
            await asyncio.sleep(0)
        assert [replica.num_open for replica in fleet.fleet._replicas] == [8, 8]
        for generation in generations:
            await generation.reach(5)
        num_continued = 0
        for version in (2, 3, 4):
            report = await fleet.publish(version)
            assert report.version == version
            num_continued += report.num_continued
        assert num_continued >= 16
        for generation in generations:
            versions = await generation.versions()
            assert min(versions) == 1 and max(versions) > 1
        assert fleet.fleet.num_moved == 0
        assert await Generation(fleet, [7], 5).versions() == {fleet.version}

    run(test())


def test_a_group_and_its_next_turn_find_their_prefix(setting):
    run, fleet = setting

    async def test():
        for group in range(4):
            prompt, before = [group + 3] * 300, sum(hits(fleet))
            first = Generation(fleet, prompt, 100)
            await first.task
            samples = [Generation(fleet, prompt, 100) for _ in range(3)]
            for sample in samples:
                await sample.task
            answer = [token for part in first.parts for token in part.ids.tolist()]
            await Generation(fleet, [*prompt, *answer, 9, 9], 4).task
            # Whole blocks, of 128 tokens on a CPU: 256 of the prompt for each sample, 384 of the turn.
            assert sum(hits(fleet)) - before == 3 * 256 + 384
        assert all(hits(fleet))  # both servers took part

    run(test())


def test_a_server_that_is_killed_hands_its_generations_to_the_other(setting):
    run, fleet = setting

    async def test():
        generations = [Generation(fleet, [i, 8], 900) for i in range(8)]
        for generation in generations:
            await generation.reach(20)
        await kill(fleet.launches[0])
        for generation in generations:
            assert await generation.versions() == {fleet.version}
        assert fleet.fleet.num_moved == 4

    run(test())
