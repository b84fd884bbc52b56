"""What a real Caffe makes of many nets. It runs under that Caffe's Python, which has no firecaffe.

    PYTHON benchmarks/caffe/prototxts_oracle.py --schema > SCHEMA.json
    PYTHON benchmarks/caffe/prototxts_oracle.py < REQUESTS > ANSWERS

A request is a line of JSON: path, phase, and image, the shape of one where the net does not say it.
An answer is one too: the request with what
tools/caffe_goldens/shapes.py says of it, or `error`, Caffe's own first line. Each net has a process
of its own, since Caffe ends it where a net is wrong, with a limit of time and of memory. The schema
is each message's fields, by the names of both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(HERE)), "tools", "caffe_goldens"))

SECONDS, BYTES = 120, 12 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schema", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("GLOG_minloglevel", "2")  # only what ends a process
    if given.schema:
        print(json.dumps(schema()))
        return
    import caffe  # noqa: F401  (before the processes part, so that each has it)

    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({**request, **answer(request)}), flush=True)


def schema() -> dict[str, dict[str, Any]]:
    """The name of a field's message, or null, by the names of message and field."""
    from caffe.proto import caffe_pb2

    found: dict[str, dict[str, Any]] = {}
    left = [caffe_pb2.NetParameter.DESCRIPTOR, caffe_pb2.SolverParameter.DESCRIPTOR]
    while left:
        message = left.pop()
        if message.name in found:
            continue
        inner = {each.name: each.message_type for each in message.fields}
        found[message.name] = {name: kind and kind.name for name, kind in inner.items()}
        left += [kind for kind in inner.values() if kind]
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result, said = os.path.join(folder, "result"), os.path.join(folder, "said")
        child = os.fork()
        if not child:
            apart(request, result, said)
        _, status = os.waitpid(child, 0)
        if status == 0:
            with open(result) as file:
                found: dict[str, Any] = json.load(file)
            return found
        with open(said, errors="replace") as file:
            lines = file.read().splitlines()
    fatal = [each for each in lines if each[:1] == "F" and each[1:5].isdigit()]
    return {"error": (fatal or lines[-1:] or [f"ended with {status}"])[0]}


def apart(request: dict[str, Any], result: str, said: str) -> None:
    """In the process of one net, which ends here."""
    import shapes  # type: ignore[import-not-found]

    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    options = {"stage": [], "level": 0, "input": [], "batch": None}
    options.update(net=request["path"], phase=request["phase"])
    options.update(image=request["image"], inside=result)
    try:
        shapes.inside(argparse.Namespace(**options))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".replace("\n", " ").encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
