_gpuaas__agent() {
    local i cur prev opts cmd
    COMPREPLY=()
    if [[ "${BASH_VERSINFO[0]}" -ge 4 ]]; then
        cur="$2"
    else
        cur="${COMP_WORDS[COMP_CWORD]}"
    fi
    prev="$3"
    cmd=""
    opts=""

    for i in "${COMP_WORDS[@]:0:COMP_CWORD}"
    do
        case "${cmd},${i}" in
            ",$1")
                cmd="gpuaas__agent"
                ;;
            gpuaas__agent,doctor)
                cmd="gpuaas__agent__subcmd__doctor"
                ;;
            gpuaas__agent,help)
                cmd="gpuaas__agent__subcmd__help"
                ;;
            gpuaas__agent__subcmd__help,doctor)
                cmd="gpuaas__agent__subcmd__help__subcmd__doctor"
                ;;
            gpuaas__agent__subcmd__help,help)
                cmd="gpuaas__agent__subcmd__help__subcmd__help"
                ;;
            *)
                ;;
        esac
    done

    case "${cmd}" in
        gpuaas__agent)
            opts="-h -V --env-file --node-id --api-url --ca-bundle-path --node-cert-ca-bundle-path --cert-path --key-path --task-signing-pubkeys --state-dir --executor --user --max-concurrent-tasks --recording-spool-mib --integrity-checks --ignored-ports --integrity-interval-seconds --validation-tools --validation-folder --driver-tools --log --simulate-gpus --gpu-model --gpu-memory-mib --simulate-provision-delay-ms --simulate-failure --clean-up --gpu-probe --gpu-deadline-seconds --kernel-log --forget-keyrings --hold-terminal --help --version doctor help"
            if [[ ${cur} == -* || ${COMP_CWORD} -eq 1 ]] ; then
                COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
                return 0
            fi
            case "${prev}" in
                --env-file)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --node-id)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --api-url)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --ca-bundle-path)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --node-cert-ca-bundle-path)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --cert-path)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --key-path)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --task-signing-pubkeys)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --state-dir)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --executor)
                    COMPREPLY=($(compgen -W "sandbox system" -- "${cur}"))
                    return 0
                    ;;
                --user)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --max-concurrent-tasks)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --recording-spool-mib)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --integrity-checks)
                    COMPREPLY=($(compgen -W "on off" -- "${cur}"))
                    return 0
                    ;;
                --ignored-ports)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --integrity-interval-seconds)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --validation-tools)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --validation-folder)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --driver-tools)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --log)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --simulate-gpus)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --gpu-model)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --gpu-memory-mib)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --simulate-provision-delay-ms)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --simulate-failure)
                    COMPREPLY=($(compgen -W "provision release protocol" -- "${cur}"))
                    return 0
                    ;;
                --gpu-deadline-seconds)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --kernel-log)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                *)
                    COMPREPLY=()
                    ;;
            esac
            COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
            return 0
            ;;
        gpuaas__subcmd__agent__subcmd__doctor)
            opts="-h --output --env-file --executor --help"
            if [[ ${cur} == -* || ${COMP_CWORD} -eq 2 ]] ; then
                COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
                return 0
            fi
            case "${prev}" in
                --output)
                    COMPREPLY=($(compgen -W "text json" -- "${cur}"))
                    return 0
                    ;;
                --env-file)
                    COMPREPLY=($(compgen -f "${cur}"))
                    return 0
                    ;;
                --executor)
                    COMPREPLY=($(compgen -W "sandbox system" -- "${cur}"))
                    return 0
                    ;;
                *)
                    COMPREPLY=()
                    ;;
            esac
            COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
            return 0
            ;;
        gpuaas__subcmd__agent__subcmd__help)
            opts="doctor help"
            if [[ ${cur} == -* || ${COMP_CWORD} -eq 2 ]] ; then
                COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
                return 0
            fi
            case "${prev}" in
                *)
                    COMPREPLY=()
                    ;;
            esac
            COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
            return 0
            ;;
        gpuaas__subcmd__agent__subcmd__help__subcmd__doctor)
            opts=""
            if [[ ${cur} == -* || ${COMP_CWORD} -eq 3 ]] ; then
                COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
                return 0
            fi
            case "${prev}" in
                *)
                    COMPREPLY=()
                    ;;
            esac
            COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
            return 0
            ;;
        gpuaas__subcmd__agent__subcmd__help__subcmd__help)
            opts=""
            if [[ ${cur} == -* || ${COMP_CWORD} -eq 3 ]] ; then
                COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
                return 0
            fi
            case "${prev}" in
                *)
                    COMPREPLY=()
                    ;;
            esac
            COMPREPLY=( $(compgen -W "${opts}" -- "${cur}") )
            return 0
            ;;
    esac
}

if [[ "${BASH_VERSINFO[0]}" -eq 4 && "${BASH_VERSINFO[1]}" -ge 4 || "${BASH_VERSINFO[0]}" -gt 4 ]]; then
    complete -F _gpuaas__agent -o nosort -o bashdefault -o default gpuaas-agent
else
    complete -F _gpuaas__agent -o bashdefault -o default gpuaas-agent
fi
