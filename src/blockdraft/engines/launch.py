"""One launch from start to end: the engine runs, says what it understood, is probed, and is never left behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from blockdraft.engines.assemble import Launch
from blockdraft.engines.cards import Floor
from blockdraft.engines.command import extra_value
from blockdraft.engines.confirm import Watch
from blockdraft.engines.explain import likely_causes
from blockdraft.engines.measure import PROMPTS, Acceptance, Client, probe
from blockdraft.engines.process import EngineProcess
from blockdraft.errors import RequestError, UnavailableError, shown

_POLL_S = 0.2
_SETTLE_S = 0.5  # a log line may come just after the answer that it belongs to
_DYING_S = 2.0  # how long an engine that broke off an answer may take to end
STARTED_WRONG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How long to wait, what to ask, when to be content. Times in seconds."""

    startup_timeout_s: float
    probe_timeout_s: float
    stop_grace_s: float
    num_probes: int
    num_probe_tokens: int
    floor: Floor
    is_check_only: bool
    extra: tuple[str, ...] = ()


class _Interrupted(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(slots=True)
class _Signals:
    """SIGINT, SIGTERM and SIGHUP: kept until the engine is in our hands, raised from then on, once."""

    number: int | None = None
    is_armed: bool = False

    def arm(self) -> None:
        self.is_armed = True
        if self.number is not None:
            raise _Interrupted(self.number)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_first, self.number = self.number is None, number
        if is_first and self.is_armed:
            raise _Interrupted(number)


@contextlib.contextmanager
def _caught_signals() -> Iterator[_Signals]:
    handler = _Signals()
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in caught}
    try:
        yield handler
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def run_launch(launch: Launch, conduct: Conduct, *, on_line: Callable[[str], None], note: Callable[[str], None]) -> int:
    """Start the engine and stay with it: its exit code, 1 if it started wrong, 128 + n after signal n.

    `on_line` gets every line of its log, `note` what we have to say. Raises RequestError for a port in use and
    UnavailableError for an engine that ends, stays silent or cannot be asked; it is stopped before either leaves here.
    """
    _check_port(launch)
    watch = Watch(launch.engine, launch.setting)

    def take(line: str) -> None:
        watch.feed(line)
        on_line(line)

    argv = launch.command.argv
    if launch.program is not None:
        argv = [launch.program, *argv[1:]]
    process: EngineProcess | None = None
    with _caught_signals() as signals:
        try:
            process = EngineProcess(argv, launch.command.environment, take)
            signals.arm()
            return _attend(launch, conduct, process, watch, note)
        except _Interrupted as stop:
            note(f"{stop}: stopping {launch.engine.label}")
            return 128 + stop.number
        finally:
            signals.is_armed = False  # a second signal must not keep us from stopping
            if process is not None:
                process.stop(conduct.stop_grace_s)


def _attend(launch: Launch, conduct: Conduct, process: EngineProcess, watch: Watch, note: Callable[[str], None]) -> int:
    setting = launch.setting
    if setting.node_rank > 0:
        note(f"node {setting.node_rank} of {setting.machine.num_nodes}: node 0 is asked and probed")
        return process.wait()
    client = Client(setting.host, setting.port, extra_value(conduct.extra, "--api-key"))
    begin = time.monotonic()
    note(f"waiting for {launch.engine.ready_path}, at most {conduct.startup_timeout_s:g} s")
    _wait_until_ready(launch, conduct, process, watch, client)
    wrong = watch.contradictions()
    if not wrong:
        note(f"ready after {time.monotonic() - begin:.0f} s")
        time.sleep(_SETTLE_S)
        wrong = watch.contradictions()
    for finding in watch.findings():
        note(finding.text)
    for alarm in watch.alarms:
        note(alarm.text)
    if wrong:
        note(f"stopping {launch.engine.label}, it would not serve what was asked: {'; '.join(wrong)}")
        return STARTED_WRONG
    if conduct.num_probes and not _is_accepting(launch, conduct, process, watch, client, note):
        return STARTED_WRONG
    if conduct.is_check_only:
        note(f"checked; stopping {launch.engine.label}")
        return 0
    note(f"serving on http://{setting.host}:{setting.port}")
    code = process.wait()
    note(f"{launch.engine.label} ended with code {code}: {shown(process.last_line())}")
    return code if code >= 0 else 128 - code


def _check_port(launch: Launch) -> None:
    setting = launch.setting
    if setting.node_rank > 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in setting.host else socket.AF_INET) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((setting.host, setting.port))
        except OSError as error:
            raise RequestError(
                f"port {setting.port} of {setting.host} cannot be had ({error.strerror or error}): stop what listens "
                "there, or give another --port"
            ) from None


def _wait_until_ready(launch: Launch, conduct: Conduct, process: EngineProcess, watch: Watch, client: Client) -> None:
    """Return when the engine answers, or when its log already shows that it understood something else."""
    deadline = time.monotonic() + conduct.startup_timeout_s
    while not client.is_ready(launch.engine.ready_path):
        if process.is_ended(within_s=0):
            raise UnavailableError(
                f"{launch.engine.label} ended with code {process.returncode} before it was ready; its last line: "
                f"{shown(process.last_line(), 240)}"
            )
        if watch.contradictions():
            return
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"{launch.engine.label} was not ready after {conduct.startup_timeout_s:g} s and is stopped; its last "
                f"line: {shown(process.last_line(), 240)}; give it more with --startup-timeout"
            )
        time.sleep(_POLL_S)


def _is_accepting(
    launch: Launch,
    conduct: Conduct,
    process: EngineProcess,
    watch: Watch,
    client: Client,
    note: Callable[[str], None],
) -> bool:
    try:
        acceptance = probe(
            client,
            launch.engine.acceptance,
            num_prompts=min(conduct.num_probes, len(PROMPTS)),
            num_tokens=conduct.num_probe_tokens,
            timeout_s=conduct.probe_timeout_s,
            settle_s=_SETTLE_S,
            log=watch.lines,
        )
    except UnavailableError as error:
        if not process.is_ended(within_s=_DYING_S):
            raise
        raise UnavailableError(
            f"{launch.engine.label} ended with code {process.returncode} while it was probed: "
            f"{shown(process.last_line(), 240)} ({error})"
        ) from None
    note(
        f"acceptance {acceptance.length:.2f} tokens a step, {acceptance.formula} over {acceptance.num_steps} steps of "
        f"{min(conduct.num_probes, len(PROMPTS))} probes; floor {conduct.floor.length:.2f}: {conduct.floor.ground}"
    )
    if acceptance.length >= conduct.floor.length:
        return True
    _explain(launch, watch, acceptance, note)
    return False


def _explain(launch: Launch, watch: Watch, acceptance: Acceptance, note: Callable[[str], None]) -> None:
    note(f"too little is accepted; stopping {launch.engine.label}. Likely causes, the likeliest first:")
    causes = likely_causes(launch.setting, acceptance, watch.findings(), launch.rules)
    for number, cause in enumerate(causes, start=1):
        note(f"{number}. {cause.name}: {cause.why}; {cause.remedy}")
