"""A transport is one file, and a line that names it."""

import gc
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

import tidemill
from tidemill.api.edges import Edge
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Field
from tidemill.core.user_code_loading import load_attribute
from tidemill.transports.local import LocalBell, LocalLink
from tidemill.transports.shared import EventBell, SharedTransport
from tidemill.transports.table import TRANSPORTS, find_transport

EXAMPLE = f"{Path(__file__).parents[2]}/examples/own_transport.py:Files"
Files = load_attribute(EXAMPLE, "test")
NOTE = "TEST_TRANSPORT_NOTE"


class Noted(Files):
    """Writes down, at the end, how large each edge is."""

    def close(self):
        sizes = {path.name: path.stat().st_size for path in Path(self.folder.name).iterdir()}
        Path(os.environ[NOTE]).write_text(json.dumps([self.folder.name, sizes]))
        super().close()


class OverNoted(tidemill.ProcessesLauncher):
    transport = f"{__file__}:Noted"


def test_processes_train_over_a_transport_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTE, str(tmp_path / "note"))
    result = tidemill.train(
        "CartPole-v1",
        steps=20_000,
        launch=f"{__file__}:OverNoted",
        layout="given",
        run_dir=tmp_path / "run",
        quiet=True,
    )
    assert result.summary["status"] == "completed" and result.summary["env_steps"] >= 20_000
    folder, sizes = json.loads((tmp_path / "note").read_text())
    assert any(name.startswith("samples") for name in sizes)
    assert min(sizes.values()) > 4096 and not Path(folder).exists()


def test_a_transport_that_there_is_not_is_named_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r'no Transport is called "shard"; did you mean "shared"'):
        find_transport("shard")
    with pytest.raises(
        ConfigError, match=r"a transport is named, so that worker processes find it.*not <class"
    ):
        find_transport(Files)


def test_shared_memory_that_cannot_all_be_made_leaves_no_open_file():
    edges = [Edge(f"rows/{number}", "channel", "a-0", ("b-0",)) for number in range(2_000)]
    gc.collect()  # what is closed meanwhile is none of this
    before, (soft, hard) = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 50, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            SharedTransport(edges, {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(os.listdir("/proc/self/fd")) <= set(before)


@pytest.mark.parametrize("name", [*TRANSPORTS, EXAMPLE])
def test_channels_and_cells_of_every_transport_reach_the_other_worker(name):
    edges = [Edge("rows", "channel", "a-0", ("b-0",)), Edge("value", "cell", "b-0", ("a-0",))]
    descriptors = {worker: os.eventfd(0) for worker in ("a-0", "b-0")}
    transport = find_transport(name)(edges, descriptors)
    bells = {worker: EventBell(descriptor) for worker, descriptor in descriptors.items()}
    link, _ = LocalLink.pair(LocalBell(), LocalBell())
    a, b = (transport.endpoints(bells[worker], link, transport.handles(worker)) for worker in bells)
    producer, consumer = a.producer("rows"), b.consumer("rows")
    writer, reader = b.writer("value"), a.reader("value")
    schema = {"x": Field((3,), "float32")}
    assert not consumer.attach() and not reader.attach()
    producer.offer(schema, (2,), 2)
    assert bells["b-0"].wait(0) and consumer.attach() and (consumer.lead, consumer.slots) == ((2,), 2)
    for number in range(5):
        producer.reserve()["x"][:] = number
        producer.commit()
        assert bells["b-0"].wait(0) and consumer.take()["x"].tolist() == [[number] * 3] * 2
        consumer.release()
        assert bells["a-0"].wait(0)
    writer.offer(schema)
    writer.write({"x": np.arange(3, dtype=np.float32)}, 7)
    into = {"x": np.zeros(3, np.float32)}
    assert bells["a-0"].wait(0) and reader.attach() and reader.newest() == reader.read(into) == 7
    assert into["x"].tolist() == [0, 1, 2]
    transport.close()
    transport.close()  # again, which closes nobody else's
    for descriptor in descriptors.values():
        os.close(descriptor)
