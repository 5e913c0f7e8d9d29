#compdef rrl
# Completion of rrl for zsh, made by: rrl completion zsh
_rrl() {
    local line tab=$'\t' prefix=""
    local -a described
    [[ ${words[CURRENT]} == --*=* ]] && prefix="${words[CURRENT]%%=*}="
    for line in "${(@f)$("${words[1]/#\~/$HOME}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        case "$line" in
            "") ;;
            :file) compset -P '*='; _files; return ;;
            :folder) compset -P '*='; _files -/; return ;;
            *) described+=("${prefix}${${line%%$tab*}//:/\\:}${${line#${line%%$tab*}}/$tab/:}") ;;
        esac
    done
    (( ${#described} )) && _describe -V rrl described
}
if [[ $funcstack[1] == _rrl ]]; then
    _rrl "$@"
else
    compdef _rrl rrl
fi
