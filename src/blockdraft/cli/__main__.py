from blockdraft.cli import main

main()
