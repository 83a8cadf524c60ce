"""The documentation site: pages that are generated from the source, and the pages as the site's generator reads them.

__main__.py    `python -m website` writes the generated pages of docs/
commands.py    The page of the commands and their options
public.py      The page of the public names of `arborl`
packages.py    The page of the packages of the source
notebooks.py   Notebooks: run them, and their pages
site_pages.py  `python -m website.site_pages` writes all pages of the site, with links that work there
"""
