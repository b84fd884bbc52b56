"""The generated data set, made by the fork server before any of its processes asks for it.

A training reads it in its launcher and in each rank: a third of a second of a processor every time.
Its bytes are tested where it is made (tests/unit/data).
"""

from functools import cache

import torch

from firecaffe.data import source
from firecaffe.data.generated import generate

threads = torch.get_num_threads()
# A fork of a process in which OpenMP has begun threads waits for them for ever.
torch.set_num_threads(1)
made_once = vars(source)["generate"] = cache(generate)
made_once()
torch.set_num_threads(threads)
