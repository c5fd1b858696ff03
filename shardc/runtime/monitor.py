"""Which rank is to blame: each rank says in the job's store that it lives, and which instruction it is at.

A broken connection tells the survivors that *someone* is gone, and a timeout not even that; worse, the first survivor
to give up breaks the connections of the others. So each rank writes a record every second (its beat, its step and
instruction, the error it died of, if it could say), and one whose collective fails reads everyone's:

    silent, without an error of its own    it died: SC502, even where others failed of it first
    an error of its own                    it failed: SC502, with that error
    alive, at an earlier instruction       it is late or stuck: SC503

torchrun notices a dead rank too, and ends the others with SIGTERM. They then say who died before they go.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from shardc.ir.diagnostic import ShardcError, error
from shardc.runtime.wake import STOP, Bell

BEAT = 0.5  # seconds
SILENCE = 6 * BEAT  # without a new beat for so long, a rank counts as dead
ALONE = "without an error of its own"


@dataclass(frozen=True)
class Record:
    """What a rank last said of itself. `own` is the error it failed of, if that was not a collective's."""

    beat: int = -1
    step: int = 0
    at: int = 0  # index of the instruction
    failed: bool = False
    own: str = ""
    left: bool = False  # it finished its work and closed
    told: bool = False  # it got SIGTERM, and so did not die of itself
    blamed: int = -1  # the rank that it found dead: whoever waited for it, and fails in turn, need not find out again


def _tells(record: Record) -> bool:
    """Whether what a rank says of itself is enough to know why another failed."""
    return bool(record.own) or record.blamed >= 0


class Places(Protocol):
    """What the numbers mean that ranks give for the instructions they are at."""

    def name(self, rank: int, at: int) -> str: ...

    def waits(self, rank: int, at: int) -> bool:
        """Whether a rank that is there is known to wait for another."""
        ...


@dataclass(frozen=True)
class Alike:
    """All ranks run the same instructions."""

    names: Sequence[str]

    def name(self, rank: int, at: int) -> str:
        return self.names[at]

    def waits(self, rank: int, at: int) -> bool:
        return False


class Monitor:
    """Beats in a thread of its own. The executor sets `at`; `places` says what the instructions are called.

    `fatal` is for NCCL, whose collectives run behind the program's back: when one hangs, nothing raises. The thread
    then also listens, and when another rank has died it prints the error and ends the process.
    """

    def __init__(self, store: Any, rank: int, ranks: int, places: Places, fatal: bool = False) -> None:
        self.rank, self.ranks, self.places = rank, ranks, places
        self.step = self.at = 0
        self._store, self._beat = store, 0
        self._last_words: dict[str, Any] = {}  # what every further beat repeats
        self._fatal = fatal
        self._speaking = False  # the main thread will raise an error of its own
        self._found: tuple[int, Record] | None = None  # the dead rank that another found, while the store was there
        self._bell = Bell()
        self._say()
        self._thread = threading.Thread(target=self._run, name="shardc-monitor", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        self.step, self.at = step, 0
        self._say()

    def close(self, failure: BaseException | None = None) -> None:
        """Say goodbye, or why it is none."""
        if failure is not None and not self._speaking:
            self.failed_alone(f"{type(failure).__name__}: {failure}")
        if self._speaking:
            return  # SIGTERM stays ours: torchrun's would come before the error is printed
        if self._thread.is_alive():
            self._bell.stop()
            self._thread.join()
            self._bell.close()
        self._say(left=True)

    def failed_alone(self, why: str) -> None:
        """This rank fails for a reason of its own; the others should hear it from here."""
        self._speaking = True
        self._say(failed=True, own=why)

    def blame(self, failure: BaseException) -> ShardcError:
        """The error for a collective that failed here: names the rank that made it fail, and the instruction."""
        before: dict[int, Record] = {}
        seen: dict[int, Record] = {}
        deadline = time.monotonic() + SILENCE
        self._speaking = True
        self._say(failed=True)
        try:
            before = self._records()
            # A dead rank is known only by its silence; but an error of its own says all at once, and so does whoever
            # has waited that long already.
            while time.monotonic() < deadline and not any(_tells(record) for record in (seen or before).values()):
                time.sleep(BEAT)
                seen = self._records()
        except Exception:
            if self._found is not None:
                return self._died(*self._found, ALONE)
            return self._died(0, None, "and with it the store of the job")
        seen = seen or before
        for rank, record in seen.items():
            if record.own:
                return self._died(rank, record, f"of an error of its own: {record.own}")
        if self._last_words.get("told") and all(record.told or record.failed for record in seen.values()):
            os._exit(128 + signal.SIGTERM)  # the job was ended, and a rank that went first broke the connection
        found = {one.blamed for one in seen.values() if one.blamed in seen}
        silent = [r for r, one in seen.items() if one.beat == before[r].beat and not (one.failed or one.told)]
        for rank in found or silent:
            self._say(blamed=rank)
            self._tell(rank, seen[rank])
            return self._died(rank, seen[rank], ALONE)
        others = {r: record for r, record in seen.items() if not record.failed}
        if others:
            # Who waits for another is late because of that one, if there is one that does not.
            rank = min(others, key=lambda r: (self.places.waits(r, others[r].at), others[r].step, others[r].at))
            return self._late(rank, others[rank], failure)
        return error("SC502", f"{self._here()} failed on every rank: {failure}", hint="see the ranks' own messages")

    def _here(self) -> str:
        # On a GPU the program runs ahead of its collectives.
        where = self.places.name(self.rank, self.at)
        return f"{'or before ' if self._fatal else ''}instruction {where} of step {self.step}"

    def _last(self, rank: int, record: Record) -> str:
        where = f"instruction {self.places.name(rank, record.at)} of step {record.step}"
        often = f"ranks say so every {BEAT} seconds and at the start of a step"
        return f"rank {rank} last said that it was at {where}; {often}"

    def _died(self, rank: int, record: Record | None, how: str) -> ShardcError:
        message = f"rank {rank} died, {how}; rank {self.rank} was waiting for it in {self._here()}"
        where = self._last(rank, record) if record else None
        hint = f"look for the last output of rank {rank}"
        if not (record and record.own):
            hint += ", or for the OOM killer"
        if record and record.left:
            message = f"rank {rank} closed its trainer, and rank {self.rank} was waiting for it in {self._here()}"
            hint = "every rank must take the same steps"
        return error("SC502", message, cause=where, hint=hint)

    def _late(self, rank: int, record: Record, failure: BaseException) -> ShardcError:
        message = f"rank {rank} did not come to {self._here()} in time; rank {self.rank} waited for it"
        at = f"instruction {self.places.name(rank, record.at)} of step {record.step}"
        where = f"rank {rank} is alive, at {at}\n{failure}"
        return error("SC503", message, cause=where, hint="if it is only slow, launch with a larger timeout")

    def _records(self) -> dict[int, Record]:
        keys = {rank: f"rank{rank}" for rank in range(self.ranks) if rank != self.rank}
        return {
            rank: Record(**json.loads(self._store.get(key))) if self._store.check([key]) else Record()
            for rank, key in keys.items()
        }

    def _say(self, **what: Any) -> None:
        self._beat += 1
        self._last_words |= what
        record = Record(self._beat, self.step, self.at, **self._last_words)
        # The store may be gone, because the rank that hosts it is; then there is nobody to tell.
        with contextlib.suppress(Exception):
            self._store.set(f"rank{self.rank}", json.dumps(asdict(record)))

    def _tell(self, rank: int, record: Record) -> None:
        """Say who is dead where each rank looks at every beat; rank 0, with which the store goes, until all have."""
        with contextlib.suppress(Exception):
            self._store.set("dead", json.dumps([rank, asdict(record)]))
        if self.rank == 0:
            time.sleep(3 * BEAT)

    def _hear(self) -> None:
        with contextlib.suppress(Exception):
            if self._found is None and self._store.check(["dead"]):
                rank, record = json.loads(self._store.get("dead"))
                self._found = rank, Record(**record)

    def _run(self) -> None:
        heard: dict[int, tuple[int, float]] = {}
        last_call = float("inf")
        while True:
            rung = self._bell.wait(BEAT)
            if STOP in rung:
                return
            told = signal.SIGTERM in rung
            if told:
                # Who is dead is known by a silence; a main thread that is finding out needs as long to say it.
                last_call = min(last_call, time.monotonic() + 2 * SILENCE)
            self._say(**({"told": True} if told else {}))
            self._hear()
            if self._fatal or last_call < float("inf"):
                self._listen(heard, last_call < float("inf"))
            if time.monotonic() > last_call:
                os._exit(128 + signal.SIGTERM)

    def _listen(self, heard: dict[int, tuple[int, float]], told: bool) -> None:
        try:
            records = self._records()
        except Exception:
            self._end(self._died(0, None, "and with it the store of the job"), told)
            return
        now = time.monotonic()
        for rank, record in records.items():
            if heard.get(rank, (None,))[0] != record.beat:
                heard[rank] = record.beat, now
            if record.own:
                self._end(self._died(rank, record, f"of an error of its own: {record.own}"), told)
            elif now - heard[rank][1] > SILENCE and not (record.left or record.failed or record.told):
                self._end(self._died(rank, record, ALONE), told)
        if told and not self._speaking and all(r.told or r.left or r.failed for r in records.values()):
            os._exit(128 + signal.SIGTERM)  # nobody died: the whole job was ended, or the others have said why

    def _end(self, why: ShardcError, told: bool) -> None:
        if not self._speaking:
            print(why, file=sys.stderr, flush=True)
            os._exit(128 + signal.SIGTERM if told else 1)
