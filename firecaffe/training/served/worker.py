"""A rank that computes for the server: takes works from its lanes until it is told the end."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from firecaffe.cluster.agree import LOOK_S
from firecaffe.training.served.compute import Bench
from firecaffe.training.served.messages import END, Messages


def work(
    lanes: Sequence[Messages],
    benches: Sequence[Bench],
    asks_to_stop: Callable[[], bool],
    look: Callable[[], None],
) -> str:
    """Computes what comes over any of the lanes until all have ended. Returns the text that came
    with the end of the first; the last weights are in its message then.

    benches: of each lane. asks_to_stop: whether this process was asked to. look: called meanwhile;
    it may raise. Raises: PeerLostError if the server is gone; what computing raises.
    """
    said: SimpleQueue[tuple[int, str | BaseException]] = SimpleQueue()

    def answer(place: int, messages: Messages) -> None:
        try:
            said.put((place, _answer(messages, benches[place], asks_to_stop)))
        except BaseException as error:
            said.put((place, error))

    threads = [
        threading.Thread(target=answer, args=each, name=f"lane-{each[0]}", daemon=True)
        for each in enumerate(lanes)
    ]
    for thread in threads:
        thread.start()
    texts: dict[int, str] = {}
    try:
        while len(texts) < len(lanes):
            look()
            try:
                place, found = said.get(timeout=LOOK_S)
            except Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            texts[place] = found
    except BaseException:
        for messages in lanes:
            messages.lane.cut()
        raise
    return texts[0]


def _answer(messages: Messages, bench: Bench, asks_to_stop: Callable[[], bool]) -> str:
    while (head := messages.receive_head()).kind != END:
        if head.has_weights:
            messages.receive_weights()
        brought = bench.compute(head.work, messages.weights.views)
        messages.send_contribution(head.learner, brought, asks_to_stop())
    text = messages.receive_end(head)
    bench.end()
    return text
