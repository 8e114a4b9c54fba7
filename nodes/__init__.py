"""Node definitions: declared ports, Torch modules and readable CPU references. Installs as ``dagserve.nodes``."""
