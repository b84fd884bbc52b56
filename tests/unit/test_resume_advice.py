"""Advice is worded for a command or for a script, by where the user is."""

from firecaffe.resume_advice import command_typed, option, replaced


def test_settings_are_written_as_the_user_writes_them() -> None:
    settings = {"model.name": "a.py:net", "data.name": "a.py:sets"}
    assert replaced(settings) == f"replace={settings}"
    with command_typed():
        assert replaced(settings) == "--model.name a.py:net --data.name a.py:sets"
        assert option("nproc_per_node") == "--nproc-per-node"
    assert option("nproc_per_node") == "nproc_per_node"
