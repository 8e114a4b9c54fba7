"""The demo: real text scored by a real model, over HTTP."""
