"""Imported last by the server that ranks are forked from: what it has by then is no garbage.

Else the first collection of each of its children would look at all of it, and copy its pages.
"""

import gc

gc.collect()
gc.freeze()
