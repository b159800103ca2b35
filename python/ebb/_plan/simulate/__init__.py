"""Memory and duration of a measured step under other choices."""
