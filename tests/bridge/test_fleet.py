"""The fleet over stand-ins that die, hang, answer 500, drop connections and lose their weights. Real sockets, no vLLM."""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest
from fake_server import KEY, FakeServer, logp, next_token

from bridge.client import api as api_module
from bridge.client import replica as replica_module
from bridge.client.fleet import ATTEMPTS, Fleet
from bridge.client.process import Launch
from bridge.client.replica import FAILURES, Attached
from jaxrl.rollout.protocol import PublishReport, SamplerError, SamplingParams

PROMPT = [3, 1, 4]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {
        "POLL_SECONDS": 0.02,
        "ANSWER_SECONDS": 0.2,
        "SILENT_SECONDS": 0.4,
        "BACK_OFF_SECONDS": 0.02,
        "LEAVE_SECONDS": 0.2,
    }.items():
        monkeypatch.setattr(replica_module, name, seconds)


class RouteLink:
    """A publish without weights, by the server's routes."""

    def __init__(self, api, state):
        self.api = api

    async def publish(self, weights, version, *, in_flight, force):
        publish_id = await self.api.begin(version, {"tensors": []}, "http", in_flight=in_flight, cache="keep", force=force)
        report = await self.api.commit(publish_id)
        return PublishReport(version, report["num_bytes"], 0.0, report["num_continued"])

    def close(self):
        pass


@asynccontextmanager
async def fleet_of(*servers, version=1, open_link=RouteLink):
    """A fleet attached to stand-ins, or that starts processes; `version` is published."""
    where = [Attached(s.url, s.key) if isinstance(s, FakeServer) else s for s in servers]
    fleet = Fleet(where, open_link)
    try:
        await fleet.start()
        if version is not None:
            await fleet.publish(None, version, True)
        yield fleet
    finally:
        await fleet.close()


def run(test, count=2, seconds=20, **settings):
    async def main():
        async with asyncio.timeout(seconds), AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(FakeServer(**settings)) for _ in range(count)]
            await test(*servers)

    asyncio.run(main())


class Generation:
    """A running generation; `tokens` and `versions` so far."""

    def __init__(self, fleet, prompt=PROMPT, max_tokens=40, **params):
        self.prompt, self.params = prompt, SamplingParams(max_tokens, **params)
        self.ids, self.logp, self.versions, self.reason = [], [], [], None
        self.task = asyncio.create_task(self._go(fleet))

    async def _go(self, fleet):
        async with aclosing(fleet.stream(self.prompt, self.params)) as lines:
            async for line in lines:
                assert self.reason is None
                self.ids += line["ids"]
                self.logp += line["logp"]
                self.versions += [v for v, count in line["versions"] for _ in range(count)]
                self.reason = line.get("finish_reason")

    async def reach(self, count):
        while len(self.ids) < count and not self.task.done():
            await asyncio.sleep(0.001)

    async def whole(self):
        """Waits for its end, and holds every token to the rule, whoever sampled it."""
        await self.task
        ids = list(self.prompt)
        for token, lp, version in zip(self.ids, self.logp, self.versions, strict=True):
            assert token == next_token(ids) and lp == logp(ids, version)
            ids.append(token)
        assert self.versions == sorted(self.versions)
        assert self.reason == "length" and len(self.ids) == self.params.max_tokens
        return self


def home(*servers):
    """The server that generates, and the others."""
    busy = [server for server in servers if server.running]
    assert len(busy) == 1
    return busy[0], [server for server in servers if server is not busy[0]]


def test_a_fleet_of_one_generates_publishes_and_reports_its_load():
    async def test(server):
        async with fleet_of(server) as fleet:
            generation = Generation(fleet)
            await generation.reach(5)
            await asyncio.sleep(0.05)
            assert fleet.load().num_running == 1
            report = await fleet.publish(None, 2, True)
            assert (report.version, report.num_bytes, report.num_continued) == (2, 4, 1)
            await generation.whole()
            assert set(generation.versions) == {1, 2} and fleet.num_moved == 0
            assert set((await Generation(fleet).whole()).versions) == {2}

    run(test, count=1)


def test_a_generation_outlives_its_server():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            generation = Generation(fleet)
            await generation.reach(7)
            dead, (other,) = home(*servers)
            await dead.die()
            await generation.whole()
            assert fleet.num_moved == fleet.load().num_moved == 1
            (again,) = other.requests
            done = len(again["prompt_ids"]) - len(PROMPT)
            assert done >= 7 and again["max_tokens"] == 40 - done

    run(test)


def test_every_request_of_many_survives_deaths_and_returns():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            generations = [Generation(fleet, [i, i % 5], max_tokens=60) for i in range(40)]
            for i, server in enumerate(servers * 2):
                while sum(len(generation.ids) for generation in generations) < 200 * (i + 1):
                    await asyncio.sleep(0.001)
                await server.die()
                await asyncio.sleep(0.02)
                await server.come_back()
                while server.version != 1:
                    await asyncio.sleep(0.001)
            for generation in generations:
                await generation.whole()
            assert fleet.num_moved > 0

    run(test, count=3)


@pytest.mark.parametrize("cut", [1, 39, 40])
def test_a_connection_that_breaks_anywhere_loses_no_token(cut):
    async def test(server):
        server.drop_after = cut
        async with fleet_of(server) as fleet:
            generation = Generation(fleet)
            while not server.requests or server.running:
                await asyncio.sleep(0)
            server.drop_after = None
            await generation.whole()

    run(test, count=1)


def test_a_generation_that_ended_with_a_stop_token_before_the_connection_broke_is_over():
    async def test(server):
        async with fleet_of(server) as fleet:
            stop = next_token(PROMPT)
            server.drop_after = 1
            lines = fleet.stream(PROMPT, SamplingParams(9, stop_token_ids=(stop,)))
            got = [line async for line in lines]
            assert [line["ids"] for line in got] in ([[stop], []], [[stop]]) and got[-1]["finish_reason"] == "stop"
            assert len(server.requests) == 1

    run(test, count=1)


def test_a_server_that_hangs_loses_its_generations_to_another():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            generation = Generation(fleet, max_tokens=60)
            await generation.reach(3)
            dead, _ = home(*servers)
            dead.hangs = dead.silent = True
            await generation.whole()
            assert fleet.num_moved == 1
            dead.hangs = dead.silent = False

    run(test)


def test_a_server_that_answers_500_is_avoided_and_alone_it_is_named():
    async def test(bad, good):
        bad.generate_status = 500
        async with fleet_of(bad, good) as fleet:
            for i in range(6):
                await Generation(fleet, [i]).whole()
        async with fleet_of(bad, version=2) as fleet:
            with pytest.raises(SamplerError, match=rf"{bad.url}.*out of order|no vLLM server is left"):
                await Generation(fleet).whole()

    run(test)


def test_a_server_that_forgot_the_connection_of_the_generations_gets_another():
    async def test(server):
        async with fleet_of(server) as fleet:
            first = Generation(fleet)
            await first.reach(3)
            server._sessions.clear()
            await Generation(fleet, [8]).whole()
            await first.whole()

    run(test, count=1)


def test_a_request_that_a_server_refuses_is_not_tried_again():
    async def test(server):
        async with fleet_of(server) as fleet:
            server.key = "another"
            with pytest.raises(SamplerError, match="refuses the key"):
                await Generation(fleet).whole()

    run(test, count=1)


def test_a_rolling_publish_leaves_part_of_the_fleet_generating_and_returns_when_all_have_it():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            for server in servers:
                server.may_commit.clear()
            publishing = asyncio.create_task(fleet.publish(None, 2, True))
            most = 0
            while not publishing.done():
                paused = [server for server in servers if server.paused]
                most = max(most, len(paused))
                await asyncio.sleep(0.02)  # long enough for a third one to begin
                for server in paused:
                    server.may_commit.set()
            assert most == 2 and all(server.version == 2 for server in servers)
            assert (await publishing).num_bytes == 16

    run(test, count=4)


def test_requests_that_follow_a_publish_at_once_are_spread_over_all_servers():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            for version in (2, 3, 4):
                generations = [Generation(fleet, [i], max_tokens=20) for i in range(8)]
                for generation in generations:
                    await generation.reach(1)
                assert [replica.num_open for replica in fleet._replicas] == [4, 4]
                for generation in generations:
                    await generation.whole()
                await fleet.publish(None, version, True)

    run(test)


def test_requests_avoid_the_server_that_is_published_to():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            for server in servers:
                server.may_commit.clear()
            publishing = asyncio.create_task(fleet.publish(None, 2, True))
            while not any(server.paused for server in servers):
                await asyncio.sleep(0)
            (held,) = [server for server in servers if server.paused]
            for i in range(4):
                await Generation(fleet, [i], max_tokens=3).whole()
            assert not publishing.done() and not held.requests
            for server in servers:
                server.may_commit.set()
            await publishing

    run(test)


def test_a_server_that_dies_while_it_is_published_to_is_not_asked_again_and_again():
    async def test(server):
        async with fleet_of(server) as fleet:
            generation = Generation(fleet, max_tokens=60)
            await generation.reach(3)
            server.may_commit.clear()
            publishing = asyncio.create_task(fleet.publish(None, 2, True))
            while not server.paused:
                await asyncio.sleep(0)
            await server.die()
            await asyncio.sleep(0.1)
            server.may_commit.set()
            await server.come_back()
            assert (await publishing).version == 2
            assert set((await generation.whole()).versions) == {1, 2} and fleet.num_moved == 1

    run(test, count=1)


def test_a_publish_that_is_not_in_flight_waits_for_generations_and_holds_others_back():
    async def test(server):
        async with fleet_of(server) as fleet:
            first = Generation(fleet)
            await first.reach(3)
            publishing = asyncio.create_task(fleet.publish(None, 2, False))
            await asyncio.sleep(0.02)
            second = Generation(fleet, max_tokens=3)
            await publishing
            assert first.task.done() and set((await first.whole()).versions) == {1}
            assert set((await second.whole()).versions) == {2}

    run(test, count=1)


def test_a_server_that_misses_a_publish_gets_nothing_until_it_has_caught_up():
    async def test(bad, good):
        async with fleet_of(bad, good) as fleet:
            bad.publish_error = ("internal", "no memory")
            await fleet.publish(None, 2, True)
            assert (bad.version, good.version) == (1, 2)
            bad.requests.clear()
            for i in range(5):
                assert set((await Generation(fleet, [i], max_tokens=3).whole()).versions) == {2}
            assert not bad.requests
            bad.publish_error = None
            await fleet.publish(None, 3, True)
            while bad.version != 3:
                await asyncio.sleep(0.01)

    run(test)


def test_a_quarantined_server_gives_its_generations_away_and_is_mended():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            generation = Generation(fleet, max_tokens=200)
            await generation.reach(3)
            bad, _ = home(*servers)
            bad.publish_error, bad.quarantines = ("mismatch", "tensor x is damaged"), True
            await fleet.publish(None, 2, True)
            await generation.whole()
            assert fleet.num_moved == 1 and bad.quarantined
            bad.publish_error = None
            await fleet.publish(None, 3, True)
            while bad.version != 3:
                await asyncio.sleep(0.01)
            assert not bad.quarantined

    run(test)


def test_a_publish_that_no_server_takes_raises_what_each_said_and_the_old_weights_serve_on():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            for i, server in enumerate(servers):
                server.publish_error = ("internal", f"no room on disk {i}")
            with pytest.raises(SamplerError, match="(?s)version 2.*no room on disk 0.*no room on disk 1"):
                await fleet.publish(None, 2, True)
            assert all(len(server.publishes) == 1 + FAILURES for server in servers)
            assert set((await Generation(fleet).whole()).versions) == {1}
            for server in servers:
                server.publish_error = None
            assert (await fleet.publish(None, 3, True)).version == 3

    run(test)


def test_a_wrong_model_on_the_other_side_is_named_at_once():
    async def test(server):
        server.publish_error = ("mismatch", "model.embed_tokens.weight has shape [9, 8], not [9, 4]")
        with pytest.raises(SamplerError, match=rf"{server.url}: model.embed_tokens.weight"):
            async with fleet_of(server):
                pass
        assert len(server.publishes) == 1

    run(test, count=1)


@pytest.mark.parametrize(
    "state, message",
    [({"protocol": 2}, "protocol 2"), ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs")],
)
def test_a_server_that_cannot_be_worked_with_is_refused_at_the_start(state, message):
    async def test(server):
        server.extra_state = state
        with pytest.raises(SamplerError, match=message):
            async with fleet_of(server):
                pass

    run(test, count=1)


def test_a_server_that_is_not_there_is_named_at_the_start():
    async def test(server):
        await server.die()
        with pytest.raises(SamplerError, match=server.url):
            async with fleet_of(server):
                pass

    run(test, count=1)


def test_tokens_of_a_version_that_was_never_published_are_not_passed_on():
    async def test(server):
        async with fleet_of(server) as fleet:
            generation = Generation(fleet, max_tokens=100)
            await generation.reach(3)
            server.version = 7
            await generation.whole()
            assert set(generation.versions) == {1} and fleet.num_moved >= 1
            assert server.publishes[-1]["force"] and server.version == 1

    run(test, count=1)


def test_a_server_that_its_owner_restarted_gets_the_newest_weights_before_any_request():
    async def test(server):
        async with fleet_of(server) as fleet:
            await fleet.publish(None, 2, True)
            await server.die()
            waiting = Generation(fleet)
            await asyncio.sleep(0.1)
            await server.come_back()
            assert set((await waiting.whole()).versions) == {2}

    run(test, count=1)


def test_what_an_earlier_run_left_on_a_server_is_replaced_whatever_its_version():
    async def test(server):
        server.version = 50
        async with fleet_of(server, version=1) as fleet:
            assert set((await Generation(fleet).whole()).versions) == {1}

    run(test, count=1)


def test_samples_of_a_group_and_the_next_turn_go_where_their_prefix_is():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            for group in range(4):
                prompt = list(range(group, group + 40))
                turns = [await Generation(fleet, prompt, max_tokens=20).whole() for _ in range(3)]
                await Generation(fleet, [*prompt, *turns[0].ids, 5, 6], max_tokens=3).whole()
                prefix = [server for server in servers if any(r["prompt_ids"][:40] == prompt for r in server.requests)]
                assert len(prefix) == 1
            assert all(server.requests for server in servers)

    run(test)


def test_draining_moves_generations_and_ends_the_use_of_a_server():
    async def test(*servers):
        async with fleet_of(*servers) as fleet:
            generation = Generation(fleet, max_tokens=100)
            await generation.reach(3)
            gone, (other,) = home(*servers)
            await fleet.drain(gone.url)
            await generation.whole()
            assert fleet.num_moved == 1 and len(gone.requests) == 1
            await Generation(fleet).whole()
            assert len(gone.requests) == 1
            with pytest.raises(SamplerError, match="cannot be drained"):
                await fleet.drain(other.url)

    run(test)


def test_closing_the_iterator_aborts_the_generation_there():
    async def test(server):
        async with fleet_of(server) as fleet:
            async with aclosing(fleet.stream(PROMPT, SamplingParams(10_000))) as lines:
                await anext(lines)
            while server.running:
                await asyncio.sleep(0.01)
            generation = Generation(fleet, max_tokens=10_000)
            await generation.reach(2)
            generation.task.cancel()
            await asyncio.wait([generation.task])
            assert generation.task.cancelled()
            while server.running:
                await asyncio.sleep(0.01)

    run(test, count=1)


def test_close_ends_whoever_waits():
    async def test(server):
        async with fleet_of(server, version=None) as fleet:
            waiting = [Generation(fleet) for _ in range(3)]
            await asyncio.sleep(0.02)
            await fleet.close()
            for generation in waiting:
                with pytest.raises(SamplerError, match="closed"):
                    await generation.task

    run(test, count=1)


def test_a_line_that_never_comes_has_a_limit(monkeypatch):
    monkeypatch.setattr(api_module, "LINE_SECONDS", 0.1)

    async def test(server):
        async with fleet_of(server) as fleet:
            server.silent = True
            with pytest.raises(SamplerError, match=rf"{server.url}.*within 0.1 s"):
                await Generation(fleet).whole()
            assert len(server.requests) <= ATTEMPTS

    run(test, count=1)


# Servers of our own


def process(folder: Path, number: int = 0, *options: str) -> Launch:
    stand_in = Path(__file__).with_name("fake_server.py")
    command = (sys.executable, str(stand_in), *options)
    return Launch(command, dict(os.environ), folder / "neutral", folder / f"vllm-{number}.log", KEY, 20.0)


async def pid_of(fleet, number: int = 0) -> int:
    while not fleet._replicas[number].answer:
        await asyncio.sleep(0.01)
    return fleet._replicas[number].answer["pid"]


def test_a_server_killed_twice_in_a_row_starts_again_and_its_generations_go_on(tmp_path):
    async def test():
        async with fleet_of(process(tmp_path, 0, "--token-seconds", "0.01"), version=4) as fleet:
            generations = [Generation(fleet, [i], max_tokens=100) for i in range(4)]
            for kills in (1, 2):
                for generation in generations:
                    await generation.reach(20 * kills)
                os.kill(await pid_of(fleet), signal.SIGKILL)
                while fleet.num_restarts < kills or not fleet._replicas[0].version == 4:
                    await asyncio.sleep(0.01)
            for generation in generations:
                await generation.whole()
            assert fleet.num_moved == 8 and set(generation.versions) == {4}

    run(test, count=0)


def test_a_server_that_does_not_stay_up_is_given_up_with_its_last_lines(tmp_path):
    async def test():
        start = process(tmp_path)
        async with fleet_of(start) as fleet:
            (tmp_path / "neutral").rename(tmp_path / "elsewhere")
            (tmp_path / "neutral").write_text("no folder")
            generation = Generation(fleet, max_tokens=10_000)
            await generation.reach(3)
            os.kill(await pid_of(fleet), signal.SIGKILL)
            with pytest.raises(Exception, match="no vLLM server is left"):
                await generation.task
            with pytest.raises(SamplerError, match="no vLLM server took version 2"):
                await fleet.publish(None, 2, True)

    run(test, count=0)


def test_a_start_that_fails_ends_the_other_servers(tmp_path):
    async def test():
        fails = process(tmp_path, 1, "--no-such-option")
        with pytest.raises(SamplerError, match="(?s)did not start.*unrecognized arguments: --no-such-option"):
            async with fleet_of(process(tmp_path, 0), fails):
                pass

    run(test, count=0)
