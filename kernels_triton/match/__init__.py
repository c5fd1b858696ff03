"""Hand-tuned templates in graphs: a generated kernel that computes what a template does is run by the template.

algebra    a kernel's values as sums of products
pattern    formulas, and the search for them in kernels
table      what each template computes
match      the template of a kernel
op         the library ops: `shardc::layer_norm(inputs, kernel)`
launcher   a template on a GPU; `run` says how each is launched
"""
