"""Train Hugging Face's Llama on a data set of `datasets`: a tokenizer, packed rows, and a part of each batch per rank.

    python examples/train_datasets.py                                 all ranks simulated in this process
    torchrun --nproc-per-node 4 examples/train_datasets.py            four processes: gloo, or NCCL where there are GPUs
    ... --epochs 3 --checkpoint run                                   run it again, and it goes on within the epoch

The text is Python's own documentation, and the tokenizer is trained on it: nothing is downloaded. Documents are
tokenized and packed, end to end, into rows of `--seq` tokens. Each data coordinate loads its own share of the rows
(`split_dataset_by_node`); neighbours in tensor parallelism load the same. Needs `datasets`, `tokenizers`, `torchdata`.
"""

import argparse
import pydoc_data.topics
from itertools import chain
from typing import Any

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import shardc

END = "<end>"


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2, tp=2")
    parser.add_argument("--checkpoint", help="a folder to save to, and to go on from where it exists")
    for name, value in {"epochs": 1, "every": 20, "documents": 60, "vocab": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"batch": 16, "seq": 64, "layers": 2, "width": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args(argv)


def documents(count: int) -> datasets.Dataset:
    """The first so many topics of Python's documentation."""
    topics = sorted(pydoc_data.topics.topics.items())[:count]
    return datasets.Dataset.from_dict({"text": [text for _, text in topics]})


def tokenizer_of(texts: datasets.Dataset, vocab: int) -> Tokenizer:
    """Byte-level pairs, trained on the text: the same on every rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts["text"], trainer)
    return tokenizer


def packed(texts: datasets.Dataset, tokenizer: Tokenizer, seq: int) -> datasets.Dataset:
    """Rows of `seq` tokens: all documents end to end, each with an end token. What is left over is dropped."""
    end: Any = tokenizer.token_to_id(END)

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*encoded.ids, end] for encoded in tokenizer.encode_batch(batch["text"])]}

    def pack(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(chain.from_iterable(batch["input_ids"]))
        return {"input_ids": [tokens[i : i + seq] for i in range(0, len(tokens) - seq + 1, seq)]}

    tokenized = texts.map(tokenize, batched=True, remove_columns=["text"])
    return tokenized.map(pack, batched=True, batch_size=len(tokenized))


def loader_of(rows: datasets.Dataset, batch: int, rank: int, ranks: int) -> StatefulDataLoader[Any]:
    """This data rank's part of each batch, in an order of its own. Its state goes into the checkpoint."""
    rows = rows.select(range(len(rows) // batch * batch))  # so that all parts are equal
    own: Any = split_dataset_by_node(rows, rank=rank, world_size=ranks).with_format("torch")

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": tokens, "labels": tokens}

    generator = torch.Generator().manual_seed(17)
    return StatefulDataLoader(own, batch // ranks, shuffle=True, generator=generator, collate_fn=collate)


def trainer_of(args: argparse.Namespace) -> shardc.Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.zeros(args.batch, args.seq, dtype=torch.long)  # a whole batch, of which each rank brings its part
    plan = shardc.Plan.load("shardc:llama").merge(shardc.Plan.of(data="per_rank", clip_grad_norm=1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sample = {"input_ids": tokens, "labels": tokens}
    return shardc.compile(model, sample, mesh=args.mesh, plan=plan, optimizer=optimizer).launch(timeout=120)


def rows_of(args: argparse.Namespace) -> datasets.Dataset:
    datasets.disable_progress_bars()
    texts = documents(args.documents)
    return packed(texts, tokenizer_of(texts, args.vocab), args.seq)


def main(args: argparse.Namespace) -> list[float]:
    losses: list[float] = []
    with trainer_of(args) as trainer:
        loader = loader_of(rows_of(args), args.batch, trainer.data_rank, trainer.data_ranks)
        every = args.every if args.checkpoint else 0
        for metrics in trainer.train(loader, epochs=args.epochs, checkpoint=args.checkpoint, every=every):
            losses.append(metrics.loss)
    return losses


if __name__ == "__main__":
    main(options())
