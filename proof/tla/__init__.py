"""TLA+: running TLC on the models in spec/, and comparing its graph with that of the production `step`.

Starts Java processes and reads and writes their files; nothing else in the proof does. Start with `models`,
the configs that must hold or be violated; `tlc` runs one, `conform` compares graphs.
"""
