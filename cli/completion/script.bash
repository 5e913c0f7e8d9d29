# Completion of rrl for bash, made by: rrl completion bash
_rrl() {
    local value description current="${COMP_WORDS[COMP_CWORD]#=}" program="${1/#\~/$HOME}"
    COMPREPLY=()
    while IFS=$'\t' read -r value description; do
        case "$value" in
            :file) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
            :folder) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
            *) COMPREPLY+=("$value") ;;
        esac
    done < <("$program" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o nosort -F _rrl rrl
