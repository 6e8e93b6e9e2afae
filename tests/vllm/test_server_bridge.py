"""The server side of the bridge as a client sees it: a real vLLM, its weights and tokens against a model written out."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from server_client import (
    KEY,
    VOCAB,
    Refused,
    Server,
    checksum,
    layout,
    logprobs,
    manifest,
    model_folder,
    segment,
    weights,
)

PYTHON = Path(__file__).parents[2] / ".vllm" / "bin" / "python"
BRIDGE = Path(__file__).parents[2] / "bridge" / "server"
TOLERANCE = 2e-5
SILENCE = 3.0  # seconds after which an open publish is abandoned
WEIGHTS = {seed: weights(seed) for seed in range(4)}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make vllm-env has not been run")


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A server's process with its URL, log and a folder it may read; stopped with everything it started."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "files").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "JAXRL_BRIDGE_KEY": KEY,
        "JAXRL_BRIDGE_FILES": str(folder / "files"),
        "JAXRL_BRIDGE_PUBLISH_TIMEOUT": str(SILENCE),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(BRIDGE),
    }
    command = [PYTHON, "-P", "-m", "jaxrl_bridge.serve", "--model", model_folder(folder / "model"), "--load-format", "dummy"]
    command += [
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "8192",
        "--stream-interval",  # as runs have it; and with a line for each token this process would fall behind the server
        "16",
        "--port",
        str(port),
    ]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    process.url, process.folder = f"http://127.0.0.1:{port}", folder
    try:
        deadline = time.monotonic() + 150
        while True:
            try:
                if httpx.get(process.url + "/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("the server did not start:\n" + (folder / "log").read_text()[-4000:])
            time.sleep(0.5)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(20)


@pytest.fixture
def run(process):
    """Runs `test(server)` to its end on an event loop of its own."""

    def run(test):
        async def main():
            server = Server(process.url)
            async with server.http, asyncio.timeout(120):
                return await test(server)

        return asyncio.run(main())

    return run


async def fresh(server: Server, seed: int = 0) -> int:
    """Publishes WEIGHTS[seed], whatever a test before has left behind; the version they have."""
    version = (await server.state())["version"] + 1
    await server.publish(version, WEIGHTS[seed], force=True)
    return version


def chosen(table: np.ndarray, prompt: list[int], ids: list[int]) -> np.ndarray:
    return table[np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1), ids]


def generations(server: Server, count: int, tokens: int) -> tuple[list[asyncio.Task], asyncio.Event, list[list[int]]]:
    """`count` running generations, an event that all of them have begun, and their prompts.

    Where they must still run when this process comes to its next call, there are many and long ones: it may be starved.
    """
    begun, event = set(), asyncio.Event()

    def heard(i):
        begun.add(i)
        if len(begun) == count:
            event.set()

    prompts = [[3 + i, 7, 11] for i in range(count)]
    tasks = [
        asyncio.create_task(server.generate(prompt, tokens, heard=lambda _, i=i: heard(i))) for i, prompt in enumerate(prompts)
    ]
    return tasks, event, prompts


def test_every_route_wants_the_key(process):
    schema = httpx.get(process.url + "/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    assert schema.status_code == 200 and KEY not in schema.text
    routes = [(method, path) for path, methods in schema.json()["paths"].items() for method in methods]
    assert len(routes) > 20
    routes += [("get", path) for path in ("/openapi.json", "/docs", "/metrics", "/bridge/state", "/no/such/route")]
    routes += [("post", "/health"), ("options", "/v1/models"), ("post", "/bridge/generate"), ("post", "/bridge/publish/begin")]
    routes += [("post", "/bridge/probe")]
    wrong = [{}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}, {"Authorization": "Bearer x"}]
    with httpx.Client(base_url=process.url) as client:
        for method, path in routes:
            if (method, path) == ("get", "/health"):
                continue
            for headers in wrong:
                answer = client.request(method, path.replace("{", "").replace("}", ""), headers=headers)
                assert answer.status_code == 401, (method, path, answer.status_code)
        assert client.get("/health").status_code == 200


def test_a_websocket_wants_the_key(process):
    def upgrade(headers: str) -> bytes:
        host, port = process.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                f"GET /v1/realtime HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n".encode()
            )
            return connection.recv(1000)

    assert upgrade("").startswith(b"HTTP/1.1 401")
    assert not upgrade(f"Authorization: Bearer {KEY}\r\n").startswith(b"HTTP/1.1 401")


def test_the_key_is_in_no_log_and_no_argument(process):
    assert KEY not in (process.folder / "log").read_text()
    for pid in _session(process.pid):
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        if pid != process.pid:
            assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_tokens_and_log_probs_are_the_models(run):
    async def test(server):
        version = await fresh(server)
        prompt = list(range(5, 25))
        result = await server.generate(prompt, 30, seed=1)
        assert len(result["ids"]) == 30 and result["finish_reason"] == "length"
        assert result["versions"] == [version] * 30
        table = logprobs(WEIGHTS[0], prompt + result["ids"])
        np.testing.assert_allclose(result["logp"], chosen(table, prompt, result["ids"]), atol=TOLERANCE)
        again = await server.generate(prompt, 30, seed=1)
        assert again["ids"] == result["ids"]
        stopped = await server.generate(prompt, 30, seed=1, stop_token_ids=[result["ids"][9]])
        end = result["ids"].index(result["ids"][9]) + 1
        assert stopped["ids"] == result["ids"][:end] and stopped["finish_reason"] == "stop"
        greedy = await server.generate(prompt, 10, temperature=0.0)
        assert greedy["ids"] == [int(logprobs(WEIGHTS[0], prompt + greedy["ids"])[19 + i].argmax()) for i in range(10)]
        warm = await server.generate(prompt, 10, temperature=1.5)
        table = logprobs(WEIGHTS[0], prompt + warm["ids"]) / 1.5
        table -= np.log(np.exp(table).sum(-1, keepdims=True))
        np.testing.assert_allclose(warm["logp"], chosen(table, prompt, warm["ids"]), atol=TOLERANCE)

    run(test)


def test_an_end_of_sequence_token_ends_nothing_by_itself(run):
    async def test(server):
        head = {name: value.copy() for name, value in WEIGHTS[0].items()}
        head["lm_head.weight"][:] = 0  # every token alike, the model's end of sequence (2) among them
        await server.publish((await server.state())["version"] + 1, head, force=True)
        results = await asyncio.gather(*(server.generate([5, 6], 200) for _ in range(8)))
        assert all(len(result["ids"]) == 200 for result in results)
        assert any(2 in result["ids"] for result in results)

    run(test)


def test_requests_that_make_no_sense_are_refused(run):
    async def test(server):
        for prompt, settings in (
            ([], {}),
            ([5], {"temperature": -1.0}),
            ([5], {"top_p": 2.0}),
            ([VOCAB], {}),
            ([-1], {}),
            ([5] * 9000, {}),
            ([5], {"max_tokens": 0}),
        ):
            with pytest.raises(Refused) as refused:
                await server.generate(prompt, **({"max_tokens": 4} | settings))
            assert (refused.value.status, refused.value.kind) == (400, "bad_request"), settings
        with pytest.raises(Refused, match="prompt_ids"):
            await server.call("POST", "/bridge/generate", {"request_id": "a", "max_tokens": 4, "temperature": 1.0})

    run(test)


def test_a_client_that_leaves_ends_its_generation(run):
    async def test(server):
        await fresh(server)
        tasks, begun, _ = generations(server, 4, 8000)
        await begun.wait()
        assert (await server.state())["running"] == 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: quiet(server))

    run(test)


async def quiet(server):
    state = await server.state()
    return state["running"] == state["waiting"] == 0


async def until(condition, seconds: float = 10.0):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("publishes", [20, pytest.param(100, marks=pytest.mark.whole)])
def test_publishes_under_sixteen_generations(run, publishes):
    """Every token's log-prob is that of the weights its version names, context recomputed; none is cut short."""
    tokens = 400

    async def test(server):
        first, over, results = await fresh(server, 0), asyncio.Event(), []
        layouts = [layout(WEIGHTS[seed]) for seed in (0, 1)]

        async def keep_generating(prompt):
            while not over.is_set():
                results.append((prompt, await server.generate(prompt, tokens)))

        tasks = [asyncio.create_task(keep_generating([3 + i, 7, 11])) for i in range(16)]
        await until(lambda: all_started(server, 16))
        continued = []
        with segment(layouts[0][1]) as even, segment(layouts[1][1]) as odd:
            for i in range(1, publishes + 1):
                publish_id = await server.begin(first + i, WEIGHTS[i % 2])
                await server.bucket(publish_id, layouts[i % 2][0], (even, odd)[i % 2])
                report = await server.commit(publish_id)
                assert report["version"] == first + i
                continued.append(report["num_continued"])
        over.set()
        await asyncio.gather(*tasks)
        assert np.median(continued) == 16
        labels, crossed = set(), 0
        for prompt, result in results:
            assert len(result["ids"]) == tokens and result["finish_reason"] == "length"
            versions = np.array(result["versions"]) - first
            assert (np.diff(versions) >= 0).all()
            labels |= set(versions.tolist())
            crossed += len(set(versions.tolist())) - 1
            both = np.stack([chosen(logprobs(WEIGHTS[s], prompt + result["ids"]), prompt, result["ids"]) for s in (0, 1)])
            own, other = both[versions % 2, np.arange(tokens)], both[1 - versions % 2, np.arange(tokens)]
            np.testing.assert_allclose(result["logp"], own, atol=TOLERANCE)
            assert (abs(other - own) > 1e-3).mean() > 0.98  # so that a wrong label would have been seen
        assert len(labels) > publishes / 2 and crossed > 5 * publishes

    run(test)


async def all_started(server, count):
    return (await server.state())["running"] == count


def test_kept_keys_and_values_are_the_old_weights(run):
    async def test(server):
        first = await fresh(server, 0)
        tasks, begun, prompts = generations(server, 16, 1500)
        await begun.wait()
        await server.publish(first + 1, WEIGHTS[1], cache="keep")
        await asyncio.gather(*tasks)
        # A machine with few cores may let one run to its end before the others begin.
        crossed = [(p, t.result()) for p, t in zip(prompts, tasks, strict=True) if len(set(t.result()["versions"])) == 2]
        assert len(crossed) >= 8
        for prompt, result in crossed[:3]:
            ids, count = result["ids"], result["versions"].count(first)
            # The last old token was sampled, not yet read: its keys and values are the new weights'.
            kept = len(prompt) + count - 1
            table = logprobs(WEIGHTS[1], prompt + ids, old=WEIGHTS[0], kept=kept)
            new = table[np.arange(len(ids) - count), ids[count:]]
            np.testing.assert_allclose(result["logp"][count:], new, atol=TOLERANCE)
            recomputed = chosen(logprobs(WEIGHTS[1], prompt + ids), prompt, ids)[count:]
            assert abs(recomputed - new).max() > 1e-3

    run(test)


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_a_prefix_of_older_weights_serves_no_new_request(run, cache):
    async def test(server):
        first, prompt = await fresh(server, 0), [(7 * i) % VOCAB for i in range(600)]
        await server.generate(prompt, 2)
        await server.publish(first + 1, WEIGHTS[1], cache=cache)
        result = await server.generate(prompt, 4)
        table = logprobs(WEIGHTS[1], prompt + result["ids"])
        np.testing.assert_allclose(result["logp"], chosen(table, prompt, result["ids"]), atol=TOLERANCE)

    run(test)


@pytest.mark.whole
def test_the_same_version_again_has_prefixes_of_its_own(run):
    async def test(server):
        first, prompt = await fresh(server, 0), [(5 * i) % VOCAB for i in range(600)]
        await server.generate(prompt, 2)
        await server.publish(first, WEIGHTS[2], cache="keep", force=True)
        result = await server.generate(prompt, 4)
        table = logprobs(WEIGHTS[2], prompt + result["ids"])
        np.testing.assert_allclose(result["logp"], chosen(table, prompt, result["ids"]), atol=TOLERANCE)

    run(test)


def test_every_transport_of_host_memory_loads_the_same(run, process):
    from safetensors.numpy import save_file

    async def test(server):
        prompt = [4, 5, 6]

        async def serves(seed, version):
            result = await server.generate(prompt, 10)
            assert set(result["versions"]) == {version}
            table = logprobs(WEIGHTS[seed], prompt + result["ids"])
            np.testing.assert_allclose(result["logp"], chosen(table, prompt, result["ids"]), atol=TOLERANCE)

        version = await fresh(server, 0)
        for transport, staged, seed in (
            ("http", False, 1),
            ("file", False, 2),
            ("shm", True, 3),
            ("http", True, 0),
            ("file", True, 1),
        ):
            version += 1
            tensors = WEIGHTS[seed]
            names = list(tensors)
            halves = [{name: tensors[name] for name in part} for part in (names[:9], names[9:])]
            publish_id = await server.begin(version, tensors, transport=transport, staged=staged)
            if transport == "file":
                for i, half in enumerate(halves):
                    path = process.folder / "files" / f"{version}-{i}.safetensors"
                    save_file(half, path)
                    entries = [{"name": name, "checksum": checksum(array)} for name, array in half.items()]
                    await server.bucket(publish_id, entries, {"path": str(path)})
            elif transport == "http":
                offset = 0
                for half in halves:
                    entries, area = layout(half)
                    # Staged, the area holds all buckets at once; else each may overwrite the last.
                    entries = [entry | {"offset": entry["offset"] + offset} for entry in entries]
                    for start in range(0, len(area), 100_000):
                        part = area[start : start + 100_000]
                        route = f"/bridge/publish/{publish_id}/data?offset={offset + start}"
                        await server.call("PUT", route, content=part)
                    await server.bucket(publish_id, entries, {})
                    offset += len(area) if staged else 0
            else:
                (entries, area), (more, rest) = map(layout, halves)
                with segment(area) as source, segment(rest) as second:
                    await server.bucket(publish_id, entries, source)
                    await server.bucket(publish_id, more, second)
                    assert not (await server.state())["paused"]
                    report = await server.commit(publish_id)
                assert report["num_bytes"] == sum(array.nbytes for array in tensors.values())
                await serves(seed, version)
                continue
            assert (await server.commit(publish_id))["version"] == version
            await serves(seed, version)

    run(test)


def test_a_manifest_that_is_not_the_models_is_refused_by_name(run):
    async def test(server):
        version = await fresh(server, 0)
        name = "model.layers.1.self_attn.k_proj.weight"
        lacking = {key: value for key, value in WEIGHTS[1].items() if key != name}
        wrong = {
            "unknown": (WEIGHTS[1] | {"model.layers.0.self_attn.q_norm.weight": np.ones(32, np.float32)}, "q_norm"),
            "missing": (lacking, name),
            "wider": (WEIGHTS[1] | {name: np.zeros((64, 64), np.float32)}, name),
            "longer vocabulary": (WEIGHTS[1] | {"lm_head.weight": np.zeros((VOCAB + 8, 64), np.float32)}, "lm_head.weight"),
        }
        for case, (tensors, named) in wrong.items():
            with pytest.raises(Refused) as refused:
                await server.begin(version + 1, tensors)
            assert refused.value.kind == "mismatch" and named in refused.value.message, case
        body = {"version": version + 1, "manifest": manifest(WEIGHTS[1]), "transport": "shm"}
        body["manifest"]["tensors"][3]["dtype"] = "F64"
        with pytest.raises(Refused, match="F64"):
            await server.call("POST", "/bridge/publish/begin", body)
        state = await server.state()
        assert (state["version"], state["paused"], state["quarantined"]) == (version, False, None)
        assert (await server.generate([5, 6], 5))["versions"] == [version] * 5

    run(test)


@pytest.mark.whole
def test_damage_before_anything_was_loaded_leaves_the_server_as_it_was(run):
    async def test(server):
        version = await fresh(server, 0)
        entries, area = layout(WEIGHTS[1])
        tasks, begun, prompts = generations(server, 16, 1500)
        await begun.wait()
        damaged = bytearray(area)
        damaged[entries[4]["offset"] + 5] ^= 1
        with segment(bytes(damaged)) as source:
            publish_id = await server.begin(version + 1, WEIGHTS[1])
            with pytest.raises(Refused, match=entries[4]["name"]) as refused:
                await server.bucket(publish_id, entries, source)
        assert refused.value.kind == "mismatch"
        with pytest.raises(Refused):
            await server.commit(publish_id)
        await asyncio.gather(*tasks)
        for prompt, task in list(zip(prompts, tasks, strict=True))[:3]:
            result = task.result()
            assert set(result["versions"]) == {version}
            table = logprobs(WEIGHTS[0], prompt + result["ids"])
            np.testing.assert_allclose(result["logp"], chosen(table, prompt, result["ids"]), atol=TOLERANCE)

    run(test)


@pytest.mark.parametrize("end", ["checksum", *(pytest.param(end, marks=pytest.mark.whole) for end in ("abort", "lacking"))])
def test_a_publish_that_fails_halfway_is_quarantined_until_one_goes_through(run, end):
    async def test(server):
        version = await fresh(server, 0)
        names = list(WEIGHTS[1])
        entries, area = layout({name: WEIGHTS[1][name] for name in names[:7]})
        more, rest = layout({name: WEIGHTS[1][name] for name in names[7:]})
        tasks, begun, prompts = generations(server, 16, 1500)
        await begun.wait()
        publish_id = await server.begin(version + 1, WEIGHTS[1])
        with segment(area) as source, segment(rest) as second:
            await server.bucket(publish_id, entries, source)
            if end == "checksum":
                more[2]["checksum"] ^= 1
                with pytest.raises(Refused, match=more[2]["name"]):
                    await server.bucket(publish_id, more, second)
            elif end == "abort":
                await server.abort(publish_id)
            else:
                with pytest.raises(Refused, match=names[7]):
                    await server.commit(publish_id)
        state = await server.state()
        assert state["paused"] and state["version"] == version
        assert f"version {version + 1}" in state["quarantined"]
        with pytest.raises(Refused) as refused:
            await server.generate([5, 6], 5)
        assert (refused.value.status, refused.value.kind) == (503, "quarantined")
        with pytest.raises(Refused):  # one that fails before it loads anything does not lift it
            await server.begin(version + 1, {names[0]: WEIGHTS[1][names[0]]})
        assert (await server.state())["quarantined"]
        waiting = [(prompt, task) for prompt, task in zip(prompts, tasks, strict=True) if not task.done()]
        assert len(waiting) >= 8  # few cores may let one run to its end before the others begin
        await server.publish(version + 2, WEIGHTS[2])
        assert (await server.state())["quarantined"] is None
        await asyncio.gather(*tasks)
        for prompt, task in waiting[:3]:
            result = task.result()
            assert len(result["ids"]) == 1500 and set(result["versions"]) == {version, version + 2}
            versions = np.array(result["versions"])
            old, new = (chosen(logprobs(WEIGHTS[s], prompt + result["ids"]), prompt, result["ids"]) for s in (0, 2))
            np.testing.assert_allclose(result["logp"], np.where(versions == version, old, new), atol=TOLERANCE)

    run(test)


def test_one_publish_at_a_time_unless_forced(run):
    async def test(server):
        version = await fresh(server, 0)
        first = await server.begin(version + 1, WEIGHTS[1])
        with pytest.raises(Refused) as refused:
            await server.begin(version + 2, WEIGHTS[1])
        assert refused.value.kind == "busy"
        for stale in (version, version - 1):
            with pytest.raises(Refused):
                await server.begin(stale, WEIGHTS[1])
        await server.publish(version + 2, WEIGHTS[2], force=True)
        with pytest.raises(Refused, match=first):
            await server.commit(first)
        with pytest.raises(Refused) as refused:
            await server.begin(version + 2, WEIGHTS[1])
        assert refused.value.kind == "version"
        await server.publish(version + 1, WEIGHTS[1], force=True)
        assert (await server.state())["version"] == version + 1

    run(test)


@pytest.mark.whole
def test_a_trainer_that_falls_silent_does_not_stop_the_server(run):
    async def test(server):
        version = await fresh(server, 0)
        await server.begin(version + 1, WEIGHTS[1])
        assert (await server.state())["paused"]
        waiting = [asyncio.create_task(server.generate([5, 6], 5)) for _ in range(2)]
        await until(lambda: resumed(server), SILENCE + 5)
        assert [(await task)["versions"] for task in waiting] == [[version] * 5] * 2
        entries, area = layout({name: WEIGHTS[1][name] for name in list(WEIGHTS[1])[:5]})
        with segment(area) as source:
            await server.bucket(await server.begin(version + 1, WEIGHTS[1]), entries, source)
        held = asyncio.create_task(server.generate([5, 6], 5))
        await until(lambda: quarantined(server), SILENCE + 5)
        with pytest.raises(Refused) as refused:
            await held
        assert refused.value.kind == "quarantined" and "heard" in refused.value.message
        await server.publish(version + 1, WEIGHTS[1])
        assert (await server.generate([5, 6], 5))["versions"] == [version + 1] * 5

    run(test)


async def resumed(server):
    return not (await server.state())["paused"]


async def quarantined(server):
    return (await server.state())["quarantined"] is not None


@pytest.mark.whole
def test_a_publish_out_of_flight_waits_for_running_generations(run):
    async def test(server):
        version = await fresh(server, 0)
        tasks, begun, _ = generations(server, 2, 3000)
        await begun.wait()
        publishing = asyncio.create_task(server.publish(version + 1, WEIGHTS[1], in_flight=False))
        asked = []
        while not publishing.done():
            asked.append(asyncio.create_task(server.generate([5, 6], 1)))
            await asyncio.wait({asked[-1], publishing}, timeout=1, return_when=asyncio.FIRST_COMPLETED)
        report = await publishing
        assert report["num_continued"] == 0
        assert [set((await task)["versions"]) for task in tasks] == [{version}] * 2
        served = [(await task)["versions"][0] for task in asked]
        assert served == sorted(served) and set(served) <= {version, version + 1}
        assert served[-1] == version + 1  # held back while the old ones ran
        # One that waits can be forced out of the way.
        tasks, begun, _ = generations(server, 2, 6000)
        await begun.wait()
        waits = asyncio.create_task(server.begin(version + 2, WEIGHTS[2], in_flight=False))
        await asyncio.sleep(0.1)
        assert (await server.publish(version + 3, WEIGHTS[3], force=True))["num_continued"] == 2
        with pytest.raises(Refused):
            await waits
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_a_source_may_not_be_any_file(run, process):
    async def test(server):
        version = await fresh(server, 0)
        entries, area = layout(WEIGHTS[1])
        outside = process.folder / "outside.safetensors"
        outside.write_bytes(area)
        (process.folder / "files" / "link.safetensors").symlink_to(outside)
        sources = [("shm", {"path": path, "size": len(area)}) for path in ("/dev/shm/other", "/etc/passwd", str(outside))]
        sources += [("shm", {"path": "/dev/shm/jaxrl-/../../etc/passwd", "size": 10})]
        sources += [("file", {"path": path}) for path in (str(outside), str(process.folder / "files/../outside.safetensors"))]
        sources += [("file", {"path": str(process.folder / "files" / "link.safetensors")})]
        for transport, source in sources:
            publish_id = await server.begin(version + 1, WEIGHTS[1], transport=transport)
            with pytest.raises(Refused) as refused:
                await server.bucket(publish_id, entries, source)
            assert refused.value.kind == "bad_request", source
        for bad in ({"offset": 8}, {"offset": -16}, {"offset": len(area)}):
            publish_id = await server.begin(version + 1, WEIGHTS[1])
            with segment(area) as source, pytest.raises(Refused) as refused:
                await server.bucket(publish_id, [entries[0] | bad], source)
            assert refused.value.kind == "bad_request", bad
        assert (await server.generate([5, 6], 5))["versions"] == [version] * 5

    run(test)


def test_adapters_need_a_server_that_has_them_enabled(run):
    async def test(server):
        with pytest.raises(Refused, match="--enable-lora"):
            await server.call("POST", "/bridge/adapter", {"version": 10**6, "path": "/dev/shm/jaxrl-none"})

    run(test)


def test_a_dead_engine_is_told_and_leaves_nothing_behind(run, process):
    """Last, for it ends the server."""

    async def test(server):
        await fresh(server, 0)
        engines = [p for p in _session(process.pid) if b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes()]
        assert engines
        tasks, begun, _ = generations(server, 2, 6000)
        await begun.wait()
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        for task in tasks:
            with pytest.raises((Refused, httpx.TransportError)) as refused:
                await task
            if isinstance(refused.value, Refused):
                assert refused.value.kind == "engine_dead"

    run(test)
    process.wait(30)
    deadline = time.monotonic() + 20
    while _session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _session(process.pid)


def _session(leader: int) -> list[int]:
    """Living processes of the session that `leader` leads."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
