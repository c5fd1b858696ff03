"""The example over Hugging Face `datasets`: data ranks that load parts make the steps of the parts together."""

from pathlib import Path

import pytest

from shardc import Parts
from tests.distributed.ranks import start

pytest.importorskip("datasets")
pytest.importorskip("tokenizers")
pytest.importorskip("torchdata")

from examples import train_datasets

WORKER = Path(__file__).parent / "datasets_worker.py"
SMALL = "--documents 6 --seq 32 --batch 8 --layers 1 --width 32 --vocab 300"


def simulated(argv: str) -> list[float]:
    """The same steps in this process, which is given the batches of both data ranks as parts."""
    args = train_datasets.options(argv.split())
    trainer = train_datasets.trainer_of(args)
    rows = train_datasets.rows_of(args)
    loaders = [train_datasets.loader_of(rows, args.batch, rank, 2) for rank in range(2)]
    losses: list[float] = []
    for _ in range(args.epochs):
        for parts in zip(*loaders, strict=True):
            losses.append(float(trainer.step(Parts(parts)).loss))
    return losses


def test_a_run_goes_on_with_its_data_set(tmp_path: Path) -> None:
    argv = f"{SMALL} --documents 2 --checkpoint {tmp_path / 'run'}"
    first = train_datasets.main(train_datasets.options(f"{argv} --epochs 1".split()))
    rest = train_datasets.main(train_datasets.options(f"{argv} --epochs 2".split()))
    assert len(first) == len(rest) >= 2
    assert rest[-1] < first[0]


@pytest.mark.long  # that processes bring parts and go on with them, `test_data.py` shows
def test_four_processes_train_on_their_parts_of_a_data_set_and_go_on(tmp_path: Path) -> None:
    argv = f"{SMALL} --checkpoint {tmp_path / 'run'}"
    first = start(f"{argv} --epochs 1", 4, tmp_path, limit=240, worker=WORKER)
    rest = start(f"{argv} --epochs 2", 4, tmp_path, limit=240, worker=WORKER)
    expected = simulated(f"{SMALL} --epochs 2")
    assert len(expected) >= 8
    assert expected[-1] < expected[0] - 0.3
    for a, b in zip(first, rest, strict=True):
        assert a is not None
        assert b is not None
        assert a["losses"] + b["losses"] == pytest.approx(expected, rel=1e-5)


def test_rows_are_the_text_end_to_end() -> None:
    args = train_datasets.options(SMALL.split())
    texts, rows = train_datasets.documents(args.documents), train_datasets.rows_of(args)
    tokenizer = train_datasets.tokenizer_of(texts, args.vocab)
    tokens = [token for row in rows["input_ids"] for token in row]
    assert all(len(row) == args.seq for row in rows["input_ids"])
    end = tokenizer.token_to_id(train_datasets.END)
    written = "".join(texts["text"][: tokens.count(end) + 1])
    text = tokenizer.decode([token for token in tokens if token != end])
    assert len(text) > 5000
    assert written.startswith(text)
