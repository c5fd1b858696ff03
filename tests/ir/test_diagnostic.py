import pickle
import re
from pathlib import Path

import pytest

import shardc.ir
from shardc.ir.diagnostic import CODES, Diagnostic, ShardcError, error, nearest, suggest


def test_renders_everything_in_order() -> None:
    diagnostic = Diagnostic(
        "SC203",
        "axis 'tp' (2) cannot shard atom 'c' (3) of h.0.attn.c_attn.weight; "
        "all_gather inserted, 48 KiB a rank, forward",
        "warning",
        location="model.py:11",
        fqn="h.0.attn",
        source_text="q, k, v = self.c_attn(x).split(self.d, dim=2)",
        op="split   b s (3 d) -> b s d, b s d, b s d",
        cause='h.0.attn.c_attn.weight = "-, tp"   (configs/plans/gpt2.yaml:9)\nthrough mm',
        hint='write "-, 3*tp" to shard each of q, k and v',
    )
    assert (
        diagnostic.render()
        == """\
warning[SC203 unaligned-axis]: axis 'tp' (2) cannot shard atom 'c' (3) of h.0.attn.c_attn.weight; all_gather inserted, \
48 KiB a rank, forward
  --> model.py:11, in h.0.attn
   | q, k, v = self.c_attn(x).split(self.d, dim=2)
  op:     split   b s (3 d) -> b s d, b s d, b s d
  cause:  h.0.attn.c_attn.weight = "-, tp"   (configs/plans/gpt2.yaml:9)
          through mm
  hint:   write "-, 3*tp" to shard each of q, k and v"""
    )


def test_error_is_a_value_error_that_survives_pickling() -> None:
    raised = ShardcError(Diagnostic("SC201", "one"), Diagnostic("SC205", "two"))
    assert isinstance(raised, ValueError)
    assert raised.code == "SC201"
    assert str(raised) == "error[SC201 unknown-axis]: one\nerror[SC205 too-many-dims]: two"
    copy = pickle.loads(pickle.dumps(raised))
    assert copy.diagnostics == raised.diagnostics


def test_unknown_codes_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="SC999"):
        error("SC999", "no such thing")


def test_names_are_unique() -> None:
    assert len({code.name for code in CODES.values()}) == len(CODES)


def test_every_code_in_the_source_is_in_the_table() -> None:
    package = Path(next(iter(shardc.ir.__path__))).parent
    used = {code for file in package.rglob("*.py") for code in re.findall(r'"(SC\d{3})"', file.read_text())}
    assert used <= CODES.keys()


def test_suggestions() -> None:
    assert suggest("TPP", ["dp", "tp"]) == "tp"
    assert suggest("zzz", ["dp", "tp"]) is None
    assert nearest("h.0.attn.c_atn", ["h.0.attn.c_attn", "h.0.mlp.c_fc", "wte"])[0] == "h.0.attn.c_attn"
