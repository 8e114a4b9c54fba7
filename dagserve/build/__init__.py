"""Building: weights files and AOTInductor packages, in worker processes, behind a cache keyed by all that matters."""
