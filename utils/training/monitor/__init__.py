"""The monitor of training runs: a page on this machine that shows run folders, those that still grow included.

`runs` finds and reads the runs, `alerts` and `contrast` judge plain numbers; only `app` and `tabs` know
Streamlit. The page shows data as text, tables and drawings, never as Markdown or HTML: nothing that a
name says is run or loaded. It writes nothing, and follows no link out of the folder.
"""
