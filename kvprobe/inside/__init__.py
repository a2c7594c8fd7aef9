"""Look inside a model and change what its heads see: capture and interventions, through nnsight.

nnsight is the experiment layer over the core, TransformerLens an independent witness; neither is loaded before it is used.
"""
