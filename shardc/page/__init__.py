"""A program as one self-contained web page: graphs, collectives and their causes, passes, memory, timeline, ranks.

It may import what reads programs (`ir`, `partition`, `schedule`, `explain`), and nothing that runs them. Start at
`content.py`, which is what the page knows; `page.js` and `page.css` are how it shows that.
"""
