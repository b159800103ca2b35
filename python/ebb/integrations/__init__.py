"""Classes that other libraries call: each module needs its library, and is imported only when the
program asks for it."""
