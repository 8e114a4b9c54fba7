"""The demo: real text scored by a real model, over HTTP."""

import os

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
