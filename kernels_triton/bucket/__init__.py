"""Bucket copies: all members of a bucket to or from its flat tensor in one launch on a GPU. Plain torch needs one for
each member.

One kernel handles every layout: any `lead`, any number of rows, chunks that do not divide evenly, odd sizes. It moves
16 bytes at a time if a member's rows start at multiples of 16 bytes (with one row, wherever the member itself starts).
Otherwise it moves single elements, as for a dim other than the first that is cut into short pieces. More than
`layout.MOST_MEMBERS` members take several launches. Members with elements of 16 bytes (complex128) are left to plain
torch.

layout         where each member lies, from the arguments of `shardc::pack` and `shardc::unpack`
kernel         the kernel of a layout: its source and launches
prepared_call  a program's call, prepared to run in every step
"""
