"""From a conversation to the tensors that the target runs on, and the masks beside them."""
