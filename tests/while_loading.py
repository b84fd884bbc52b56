"""Loaded first by the fork server: what it loads is not looked through again and again meanwhile, a
fifth of the time. `tests.made_once`, which comes last, ends it.
"""

import gc

gc.disable()
