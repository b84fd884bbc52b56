"""The identity benchmark ends well only where every row says what it must."""

from benchmarks.identity import find_faults

SAME = "identical: 1, 2, 3, 4 workers; weights aa"


def test_rows_of_one_network_must_agree_but_for_codecs_and_controls() -> None:
    verdicts = {
        ("nin",): SAME,
        ("nin", "--exchange.algorithm=tree"): SAME,
        ("nin", "--exchange.compressor=int8"): "identical: 1, 2, 3, 4 workers; weights bb",
        ("nin", "--exchange.algorithm=ring"): "1 and 3 workers differ from step 1 on",
        ("lenet",): "identical: 1, 2, 3, 4 workers; weights cc",
    }
    assert find_faults(verdicts) == []
    other = verdicts | {("nin", "--exchange.algorithm=tree"): SAME.replace("aa", "dd")}
    assert [fault.split(":")[0] for fault in find_faults(other)] == [
        "nin --exchange.algorithm=tree"
    ]
    differs = verdicts | {("nin", "--exchange.compressor=int8"): "1 and 2 workers differ"}
    assert len(find_faults(differs)) == 1
