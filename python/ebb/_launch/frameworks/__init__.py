"""Frameworks with checkpoint functions of their own, which do not call torch.utils.checkpoint."""
