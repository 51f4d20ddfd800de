"""A pipeline: the network of sharded.py, cut into stages that pass activations on.

Its blocks are found without help, as the members of an `nn.Sequential` are blocks. The first and
the last one cost little, which `pipeline_costs` may say, too: stages are cut by cost.
"""

from sharded import Deep


class Staged(Deep):
    def pipeline_blocks(self, model):
        """Names in the model, in the order in which they run."""
        return [name for name, _ in model.named_children()]

    def pipeline_costs(self, model):
        """One number per block, in any unit: here its parameters."""
        return [sum(p.numel() for p in block.parameters()) for block in model.children()]
