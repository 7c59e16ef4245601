# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_gpuaas_agent_global_optspecs
    string join \n env-file= node-id= api-url= ca-bundle-path= node-cert-ca-bundle-path= cert-path= key-path= task-signing-pubkeys= state-dir= executor= user= max-concurrent-tasks= recording-spool-mib= integrity-checks= ignored-ports= integrity-interval-seconds= validation-tools= validation-folder= driver-tools= log= simulate-gpus= gpu-model= gpu-memory-mib= simulate-provision-delay-ms= simulate-failure= clean-up gpu-probe gpu-deadline-seconds= kernel-log= forget-keyrings hold-terminal h/help V/version
end

function __fish_gpuaas_agent_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_gpuaas_agent_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_gpuaas_agent_using_subcommand
    set -l cmd (__fish_gpuaas_agent_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l env-file -d 'Environment file of the bootstrap bundle [SVC_NODE_AGENT_ENV_FILE]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l node-id -d 'Node id [SVC_NODE_ID]' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l api-url -d 'Base URL of the node-facing API, https [SVC_API_URL]' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l ca-bundle-path -d 'Trust anchor for the API; written from the bundle when it is missing [SVC_CA_BUNDLE_PATH]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l node-cert-ca-bundle-path -d 'Where the issuers of the node\'s certificate are written [SVC_NODE_CERT_CA_BUNDLE_PATH]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l cert-path -d 'The node\'s certificate [SVC_CERT_PATH]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l key-path -d 'The node\'s private key [SVC_KEY_PATH]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l task-signing-pubkeys -d 'Public keys of task signatures: [key_id:][status:]base64, separated by commas [SVC_TASK_SIGNING_PUBKEYS]' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l state-dir -d 'Folder of the journal, the identity and the allocations [SVC_NODE_AGENT_STATE_DIR, default /var/lib/gpuaas-agent]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l executor -d 'How tenants are isolated: `system` makes Linux users and needs root, `sandbox` enforces nothing' -r -f -a "sandbox\t''
system\t''"
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l user -d 'The user that the agent becomes where root starts it with the executor `sandbox` [SVC_NODE_AGENT_USER]' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l max-concurrent-tasks -d 'Tasks executed at once' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l recording-spool-mib -d 'Disk for recordings of terminals that the control plane does not have yet, in MiB; one session gets an eighth of it' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l integrity-checks -d 'Whether changes of privileges and of the agent\'s package are reported; such findings take the machine out of rent' -r -f -a "on\t''
off\t''"
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l ignored-ports -d 'Ports whose listeners are not compared, such as 32768-60999, separated by commas' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l integrity-interval-seconds -d 'Seconds between two comparisons of privileges; the file systems are searched after sixty of them' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l validation-tools -d 'Folder of stress-ng and fio, which `node.validate` runs where they are installed [SVC_NODE_AGENT_VALIDATION_TOOLS]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l validation-folder -d 'Folder in which `node.validate` tests the disk, of root alone [SVC_NODE_AGENT_VALIDATION_FOLDER, default the state\'s]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l driver-tools -d 'Folder of nvidia-smi, which `node.gpu_reset` runs [SVC_NODE_AGENT_DRIVER_TOOLS]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l log -d 'Filter of log events, in the syntax of RUST_LOG' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l simulate-gpus -d 'Simulate this many GPUs' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l gpu-model -d 'Model of the simulated GPUs' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l gpu-memory-mib -d 'Memory of each simulated GPU' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l simulate-provision-delay-ms -d 'Simulated hardware that takes this long to provision' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l simulate-failure -d 'Simulated hardware that fails one kind of task' -r -f -a "provision\t'Tasks that provision'
release\t'Tasks that release'
protocol\t'Heartbeats: they are of a protocol that no control plane supports'"
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l gpu-deadline-seconds -d 'Seconds after which NVIDIA\'s driver counts as hung' -r
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l kernel-log -d 'The kernel\'s log, one record for each read' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l clean-up -d 'Remove every tenant from this machine, which leaves the service, and end. No agent may run on it'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l gpu-probe -d 'Answers requests on standard input with calls of NVIDIA\'s management library: the agent runs this as a process of its own'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l forget-keyrings -d 'Revokes the keyrings of the current user, and exits: the agent runs this as a tenant that it removes'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -l hold-terminal -d 'Holds the program of a terminal session: the agent runs this for each session that is to outlive it'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -s V -l version -d 'Print version'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -f -a "doctor" -d 'Looks at everything that the agent needs (settings, certificates, control plane, clock, driver, cgroups, disks), and says what to do about what is wrong. Changes nothing. Exits with 0 where nothing is wrong, with 1 for warnings, with 2 for errors'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_using_subcommand doctor" -l output -r -f -a "text\t''
json\t''"
complete -c gpuaas-agent -n "__fish_gpuaas_agent_using_subcommand doctor" -l env-file -d 'Environment file of the bootstrap bundle [SVC_NODE_AGENT_ENV_FILE]' -r -F
complete -c gpuaas-agent -n "__fish_gpuaas_agent_using_subcommand doctor" -l executor -d 'How tenants are isolated: `system` makes Linux users and needs root, `sandbox` enforces nothing' -r -f -a "sandbox\t''
system\t''"
complete -c gpuaas-agent -n "__fish_gpuaas_agent_using_subcommand doctor" -s h -l help -d 'Print help'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_using_subcommand help; and not __fish_seen_subcommand_from doctor help" -f -a "doctor" -d 'Looks at everything that the agent needs (settings, certificates, control plane, clock, driver, cgroups, disks), and says what to do about what is wrong. Changes nothing. Exits with 0 where nothing is wrong, with 1 for warnings, with 2 for errors'
complete -c gpuaas-agent -n "__fish_gpuaas_agent_using_subcommand help; and not __fish_seen_subcommand_from doctor help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
