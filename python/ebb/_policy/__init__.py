"""Which decision an operator's outputs get: rules, policies, and both as text and for torch."""
