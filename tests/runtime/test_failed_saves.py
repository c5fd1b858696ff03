"""A job ends while a checkpoint that is written in the background fails: which of the two is raised."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from shardc.ir.diagnostic import ShardcError
from shardc.partition.staged_program import one_stage
from shardc.runtime.train.trainer import launch
from tests.handmade import mlp, mlp_inputs


def end_while_a_save_fails(folder: Path, end: BaseException) -> None:
    (folder / "file").write_text("")
    with launch(SimpleNamespace(staged=one_stage(mlp()), constants=mlp_inputs()), seed=3) as trainer:
        trainer.save(folder / "file/c", asynchronous=True)
        raise end


def test_an_error_is_not_hidden_and_a_note_says_that_the_save_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as ended:
        end_while_a_save_fails(tmp_path, ZeroDivisionError())
    assert ["could not be written" in note for note in ended.value.__notes__] == [True]


@pytest.mark.parametrize("exit", [SystemExit(0), SystemExit(143), KeyboardInterrupt()], ids=repr)
def test_an_exit_is_not_as_if_all_were_saved(exit: BaseException, tmp_path: Path) -> None:
    with pytest.raises(ShardcError, match="could not be written"):
        end_while_a_save_fails(tmp_path, exit)
