"""A bucket's members to and from its flat tensor, in one launch on a GPU where plain torch needs one a member.

One kernel takes all: any `lead`, any number of rows, chunks that do not divide, sizes that are odd. It moves 16 bytes
at a time where a member's rows begin with 16 bytes (and, in one row, wherever the member itself does); else an element
at a time, as where a dim that is not the first is cut into pieces shorter than that. More than `layout.MOST` members
are several launches, and those with elements of 16 bytes (complex128) are for plain torch.

layout     where each member lies, from the arguments of `shardc::pack` and `shardc::unpack`
kernel     the kernel of a layout: written, launched
prepared   a call of a program, ready to run again and again
corpus     buckets of programs, for the compile gate
"""
