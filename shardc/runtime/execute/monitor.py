"""Finds the rank to blame for a failure: each rank publishes a heartbeat and its instruction in the job's store.

A broken connection tells the survivors only that *some* rank is gone, and a timeout not even that. Worse, the first
survivor to give up breaks the connections of the others. So each rank writes a record every `BEAT` seconds (its beat,
its step and instruction, and the error that it died of, if it could report one). A rank whose collective fails reads
all records:

    ended, without an error of its own     it died: SC502, even where others failed of it first
    an error of its own                    it failed: SC502, with that error
    alive, at an earlier instruction       it is late or stuck: SC503

Whether a process of this machine has ended is the kernel's to say (`process_end`): one that is silent may be in a call
that keeps Python's lock. Of a rank on another machine only its silence is known.

torchrun also notices a dead rank, and ends the others with SIGTERM. They then report who died before they exit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from shardc.ir.diagnostic import ShardcError, error
from shardc.runtime.execute.process_end import this_process
from shardc.runtime.execute.rank_record import Record
from shardc.runtime.execute.signal_wakeup import STOP, SignalWakeup

BEAT = 0.5  # seconds
SILENCE = 6 * BEAT  # after a failure, a rank of another machine without a beat for so long counts as dead
NO_OWN_ERROR = "without an error of its own"


class CounterNames(Protocol):
    """The meaning of ranks' program counters."""

    def name(self, rank: int, counter: int) -> str: ...

    def waits(self, rank: int, counter: int) -> bool:
        """Whether a rank at this counter is known to wait for another rank."""
        ...


class RunMonitor(Protocol):
    """What an executor tells of its run: the counter of the call that it comes to, and its failures."""

    @property
    def counter(self) -> int: ...

    @counter.setter
    def counter(self, counter: int, /) -> None: ...

    def blame(self, failure: BaseException) -> Exception: ...

    def report_own_failure(self, why: str) -> None: ...


class Monitor:
    """Beats in a thread of its own. The executor sets `counter`; `counter_names` says what the instructions are called,
    and `add` those of a program that the job runs beside its own.

    `fatal` is for NCCL, whose collectives run asynchronously: when one hangs, nothing raises. The thread then also
    reads the other records, and when another rank has died it prints the error and ends the process. It does so too
    when a step's replay has not ended after `replay_limit` seconds: no watchdog of NCCL's sees its collectives.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        counter_names: CounterNames,
        fatal: bool = False,
        replay_limit: float = float("inf"),
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.step = self.counter = self.program = self.begun = 0
        self._programs = {0: counter_names}
        self._added, self._evaluations = 0, set[int]()
        self._store, self._beat = store, 0
        self._process = this_process()
        self._lasting_fields: dict[str, Any] = {"process": self._process}  # fields that every later record repeats
        self._fatal = fatal
        self.grace = 0.0  # seconds in which the main thread ends the process by itself, after SIGTERM
        self._reports_error = False  # the main thread will raise an error of its own
        self._published_death: tuple[int, Record] | None = (
            None  # the dead rank that another published, or rank 0, closed or failed
        )
        self._replay: tuple[Callable[[], bool], float] | None = None  # what says that it has ended, and when it began
        self._replays, self._replay_limit = False, replay_limit
        self._bell = SignalWakeup()
        self._publish()
        self._thread = threading.Thread(target=self._beat_loop, name="shardc-monitor", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread, SILENCE)

    def add(self, counter_names: CounterNames, evaluates: bool) -> int:
        """The number of one more program of the job; all ranks add the same ones, in one order."""
        self._added += 1
        self._programs[self._added] = counter_names
        self._evaluations |= {self._added} if evaluates else set()
        return self._added

    def remove(self, number: int) -> None:
        """Forget the names of a program that is not run again."""
        self._programs.pop(number, None)

    def begin(self, step: int, program: int = 0) -> None:
        self.step, self.counter, self.program, self._replays = step, 0, program, False
        self.begun += 1
        self._publish()

    def replays(self, ended: Callable[[], bool]) -> None:
        """The step that has begun is a replay, which runs until `ended()`."""
        self._replays, self._replay = True, (ended, time.monotonic())

    def exchange(self, topic: str, text: str, limit: float) -> list[str | None]:
        """What every rank says on a topic; None of one that goes on without, and has begun to run a program.

        Raises ShardcError that names the rank which fails meanwhile, or does not come.
        """
        keys, deadline = [f"{topic}/{rank}" for rank in range(self.ranks)], time.monotonic() + limit
        try:
            self._store.set(keys[self.rank], text)
            while True:
                records = {self.rank: Record(begun=self.begun), **self._records()}
                said = [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]
                silent = {rank: records[rank] for rank, words in enumerate(said) if words is None}
                if all(record.begun > self.begun for record in silent.values()):
                    return said
                ended = any(record.failed or record.closed for record in silent.values())
                if ended or time.monotonic() > deadline:
                    raise TimeoutError(f"no word within {limit:g} seconds")
                time.sleep(0.01)
        except ShardcError:
            raise
        except Exception as failure:
            raise self.blame(failure) from failure

    def close(self, failure: BaseException | None = None) -> None:
        """Publish that this rank has closed, or the failure that ends it."""
        if failure is not None and not self._reports_error:
            self.report_own_failure(f"{type(failure).__name__}: {failure}")
        if self._reports_error:
            return  # SIGTERM stays ours: torchrun's would come before the error is printed
        if self._thread.is_alive():
            self._end_thread()
            self._bell.close()
        atexit.unregister(self._end_thread)
        self._publish(closed=True)
        self._stay_until_others_know(closed=True)

    def _end_thread(self, limit: float | None = None) -> None:
        """Also at exit, after a failure: Python ends a daemon thread where it next asks for the interpreter. In a call
        of the store that is a destructor in C++, and `std::terminate` would abort the process. A store that does not
        answer within the `limit` is not waited for."""
        if self._thread.is_alive():  # in a forked child it is not
            self._bell.stop()
            self._thread.join(limit)

    def report_own_failure(self, why: str) -> None:
        """Publish that this rank fails for a reason of its own, for the other ranks to report."""
        self._reports_error = True
        self._publish(failed=True, own_error=why)
        self._stay_until_others_know(failed=True, own_error=why)

    def blame(self, failure: BaseException) -> ShardcError:
        """The error for a collective that failed on this rank. It names the rank to blame and the instruction."""
        earlier: dict[int, Record] = {}
        records: dict[int, Record] = {}
        deadline = time.monotonic() + SILENCE
        self._reports_error = True
        self._publish(failed=True)
        try:
            earlier = self._records()
            # A dead rank is known only by its silence. The wait ends early if a rank reports an error of its own, or a
            # rank that has already waited names the dead one.
            while time.monotonic() < deadline and not any(
                record.explains_failure for record in (records or earlier).values()
            ):
                time.sleep(BEAT)
                records = self._records()
        except Exception:
            return self._lost_store_error()
        records = records or earlier
        for rank, record in records.items():
            if record.own_error:
                return self._death_error(rank, record, f"of an error of its own: {record.own_error}")
        if self._lasting_fields.get("terminated") and all(
            record.terminated or record.failed for record in records.values()
        ):
            os._exit(128 + signal.SIGTERM)  # the job was ended, and a rank that went first broke the connection
        blamed = {record.blamed for record in records.values() if record.blamed in records}
        silent = [
            r
            for r, record in records.items()
            if record.beat == earlier[r].beat
            and not (record.failed or record.terminated or record.has_ended(self._process) is False)
        ]
        for rank in blamed or silent:
            self._publish(blamed=rank)
            self._publish_death(rank, records[rank])
            return self._death_error(rank, records[rank], NO_OWN_ERROR)
        others = {r: record for r, record in records.items() if not record.failed}
        if others:
            # A rank that waits for another is late because of it, so ranks that do not wait are blamed first.
            rank = min(
                others,
                key=lambda r: (self._waits(r, others[r]), others[r].step, others[r].counter),
            )
            return self._late_error(rank, others[rank], failure)
        return error(
            "SC502",
            f"{self._current_instruction()} failed on every rank: {failure}",
            hint="see the ranks' own messages",
        )

    def _current_instruction(self) -> str:
        if self._replays:
            return f"the replay of {self._run_text(self.step, self.program)}"
        # On a GPU the host runs ahead of the collectives.
        name = self._name(self.rank, self.counter, self.program)
        run = self._run_text(self.step, self.program)
        return f"{'or before ' if self._fatal else ''}instruction {name} of {run}"

    def _name(self, rank: int, counter: int, program: int) -> str:
        known = program in self._programs  # a rank that is ahead may run a program that others do not have yet
        return self._programs[program].name(rank, counter) if known else str(counter)

    def _waits(self, rank: int, record: Record) -> bool:
        known = record.program in self._programs
        return known and self._programs[record.program].waits(rank, record.counter)

    def _run_text(self, step: int, program: int) -> str:
        return f"an evaluation after step {step}" if program in self._evaluations else f"step {step}"

    def _position_text(self, rank: int, record: Record) -> str:
        run = self._run_text(record.step, record.program)
        if record.replays:
            return f"the replay of {run}"
        return f"instruction {self._name(rank, record.counter, record.program)} of {run}"

    def _last_record_text(self, rank: int, record: Record) -> str:
        position = self._position_text(rank, record)
        often = f"ranks say so every {BEAT} seconds and at the start of a step"
        return f"rank {rank} last said that it was at {position}; {often}"

    def _death_error(self, rank: int, record: Record | None, reason: str) -> ShardcError:
        message = f"rank {rank} died, {reason}; rank {self.rank} was waiting for it in {self._current_instruction()}"
        position = self._last_record_text(rank, record) if record else None
        hint = f"look for the last output of rank {rank}"
        if not (record and record.own_error):
            hint += ", or for the OOM killer"
        if record and record.closed:
            waiting_at = self._current_instruction()
            message = f"rank {rank} closed its trainer, and rank {self.rank} was waiting for it in {waiting_at}"
            hint = "every rank must take the same steps"
        return error("SC502", message, cause=position, hint=hint)

    def _lost_store_error(self) -> ShardcError:
        if self._published_death is not None:
            rank, record = self._published_death
            reason = f"of an error of its own: {record.own_error}" if record.own_error else NO_OWN_ERROR
            return self._death_error(rank, record, reason)
        return self._death_error(0, None, "and with it the store of the job")

    def _late_error(self, rank: int, record: Record, failure: BaseException) -> ShardcError:
        message = f"rank {rank} did not come to {self._current_instruction()} in time; rank {self.rank} waited for it"
        position = self._position_text(rank, record)
        cause = f"rank {rank} is alive, at {position}\n{failure}"
        return error("SC503", message, cause=cause, hint="if it is only slow, launch with a larger timeout")

    def _records(self) -> dict[int, Record]:
        keys = {rank: f"rank{rank}" for rank in range(self.ranks) if rank != self.rank}
        return {
            rank: Record(**json.loads(self._store.get(key))) if self._store.check([key]) else Record()
            for rank, key in keys.items()
        }

    def _publish(self, **what: Any) -> None:
        self._beat += 1
        self._lasting_fields |= what
        where = {"program": self.program, "begun": self.begun, "replays": self._replays}
        record = Record(self._beat, self.step, self.counter, **where, **self._lasting_fields)
        # The store may be gone, because the rank that hosts it is; then there is nobody to tell.
        with contextlib.suppress(Exception):
            self._store.set(f"rank{self.rank}", json.dumps(asdict(record)))

    def _publish_death(self, rank: int, record: Record) -> None:
        """Publish the dead rank under the key that all ranks read at every beat. Rank 0, which hosts the store, stays
        until they have read it."""
        with contextlib.suppress(Exception):
            self._store.set("dead", json.dumps([rank, asdict(record)]))
        if self.rank == 0:
            time.sleep(3 * BEAT)

    def _stay_until_others_know(self, **why: Any) -> None:
        """Rank 0 takes the store along: others that still wait for it have the time to read why it ends."""
        if self.rank != 0:
            return
        deadline = time.monotonic() + 3 * BEAT
        with contextlib.suppress(Exception):
            while not all(record.closed or record.failed or record.terminated for record in self._records().values()):
                if not self._store.check(["dead"]):
                    ended = Record(self._beat, self.step, self.counter, **why)
                    self._store.set("dead", json.dumps([0, asdict(ended)]))
                if time.monotonic() > deadline:
                    return
                time.sleep(0.02)

    def _read_death(self) -> None:
        with contextlib.suppress(Exception):
            if self._published_death is None and self._store.check(["dead"]):
                rank, record = json.loads(self._store.get("dead"))
                self._published_death = rank, Record(**record)

    def _beat_loop(self) -> None:
        last_beats: dict[int, tuple[int, float]] = {}
        exit_deadline = float("inf")
        while True:
            rung = self._bell.wait(BEAT)
            if STOP in rung:
                return
            terminated = signal.SIGTERM in rung
            if terminated:
                # Who is dead is known by a silence; a main thread that is finding out needs as long to say it.
                exit_deadline = min(exit_deadline, time.monotonic() + max(2 * SILENCE, self.grace))
            self._publish(**({"terminated": True} if terminated else {}))
            self._read_death()
            if self._fatal or exit_deadline < float("inf"):
                self._check_ranks(last_beats, exit_deadline < float("inf"))
            self._check_replay()
            if time.monotonic() > exit_deadline:
                os._exit(128 + signal.SIGTERM)

    def _check_ranks(self, last_beats: dict[int, tuple[int, float]], terminated: bool) -> None:
        try:
            records = self._records()
        except Exception:
            self._exit_with(self._lost_store_error(), terminated)
            return
        now = time.monotonic()
        for rank, record in records.items():
            if last_beats.get(rank, (None,))[0] != record.beat:
                last_beats[rank] = record.beat, now
            if record.own_error:
                self._exit_with(
                    self._death_error(rank, record, f"of an error of its own: {record.own_error}"), terminated
                )
            elif record.is_dead(self._process, now - last_beats[rank][1], SILENCE):
                self._exit_with(self._death_error(rank, record, NO_OWN_ERROR), terminated)
        if (
            terminated
            and not self._reports_error
            and all(r.terminated or r.closed or r.failed for r in records.values())
            and not (self.grace and all(not r.failed for r in records.values()))
        ):
            os._exit(128 + signal.SIGTERM)  # nobody died: the whole job was ended, or the others have said why

    def _check_replay(self) -> None:
        replay = self._replay
        if replay is None:
            return
        ended, began = replay
        with contextlib.suppress(Exception):  # of a GPU that failed: the main thread is told too
            if ended():
                self._replay = None if self._replay is replay else self._replay
            elif time.monotonic() - began > self._replay_limit:
                self._exit_with(self._late_replay_error(time.monotonic() - began), False)

    def _late_replay_error(self, seconds: float) -> ShardcError:
        """Names the rank that is at the earliest step, if there is one before the step that is replayed here."""
        failure = TimeoutError(f"the replay did not end within {seconds:.0f} seconds")
        earlier = {rank: record for rank, record in self._records().items() if record.step < self.step}
        if earlier:
            rank = min(earlier, key=lambda r: (self._waits(r, earlier[r]), earlier[r].step, earlier[r].counter))
            return self._late_error(rank, earlier[rank], failure)
        message = f"{self._current_instruction()} on rank {self.rank} did not end in time; all ranks have begun it"
        hint = (
            "launch without graphs=True: then the instruction is named, and if it is only slow, with a larger timeout"
        )
        return error("SC503", message, cause=str(failure), hint=hint)

    def _exit_with(self, failure: ShardcError, terminated: bool) -> None:
        if not self._reports_error:
            print(failure, file=sys.stderr, flush=True)
            os._exit(128 + signal.SIGTERM if terminated else 1)
