"""A mapping that is made once, when somebody first looks into it."""

from shardc.ir.lazy_mapping import LazyMapping


def test_it_is_made_at_the_first_look_and_once() -> None:
    made: list[int] = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"a": 1, "b": 2}

    mapping = LazyMapping(make)
    assert not made
    assert mapping["a"] == 1
    assert [*mapping] == ["a", "b"]
    assert (len(mapping), mapping.get("c"), "b" in mapping, {**mapping, "a": 3}) == (2, None, True, {"a": 3, "b": 2})
    assert repr(mapping) == "{'a': 1, 'b': 2}"
    assert mapping == {"a": 1, "b": 2}
    assert made == [1]
