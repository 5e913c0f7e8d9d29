# Completion of rrl for fish, made by: rrl completion fish
function __rrl_complete
    set -l words (commandline -opc)
    set -l program $words[1]
    set -e words[1]
    set -l current (commandline -ct)
    set -l prefix (string match -r '^--[^=]*=' -- $current)
    for line in ($program __complete $words "$current" 2>/dev/null)
        switch $line
            case :file
                __fish_complete_path (string replace -r '^--[^=]*=' '' -- $current) ''
            case :folder
                __fish_complete_directories (string replace -r '^--[^=]*=' '' -- $current) ''
            case '*'
                echo -- "$prefix$line"
        end
    end
end
complete -c rrl -f -k -a '(__rrl_complete)'
