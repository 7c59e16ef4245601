# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_gpuaas_global_optspecs
    string join \n h/help V/version
end

function __fish_gpuaas_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_gpuaas_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_gpuaas_using_subcommand
    set -l cmd (__fish_gpuaas_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c gpuaas -n "__fish_gpuaas_needs_command" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -s V -l version -d 'Print version'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "serve" -d 'Runs the control plane; set up by SVC_* variables'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "config" -d 'Checks the settings of an environment file: unknown names, wrong and missing values, all at once. Exits with 0 or 78'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "doctor" -d 'Looks at everything that a replica needs (settings, certificates, Postgres, NATS, identity provider, ports, limits), and says what to do about what is wrong. Changes nothing. Exits with 0 where nothing is wrong, with 1 for warnings, with 2 for errors'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "support-bundle" -d 'Collects what is needed to diagnose a fault from elsewhere into one archive, without secrets: findings of doctor, settings, supervision tree, overdue and parked entities, metrics, the log, Postgres\' locks, streams. Works while the service, Postgres or NATS do not'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "migrate" -d 'Brings the database to this release\'s schema, apart from serving: expand before members of this release start, contract once none of an earlier one is left. Exits with 0 where that is done, and with 75 where a contract waits for members of an earlier release'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "retention" -d 'Shows how large the tables of the database are and grow, what the retention policies keep, what their next run removes, and in how many days the disk is full. Changes nothing'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "begin-incarnation" -d 'Starts a new incarnation of a database that was restored from a backup; run it once, while no member runs. What the backup has lost must not be taken for something new. It releases every shard and raises every epoch. Where nothing was restored, it changes nothing'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "recover-report" -d 'Lists what a database that was restored from a backup has lost, by what NATS, the nodes and the payment processor have: tenants without allocation, money without posting, tokens spent. Exits with 0 where nothing is lost, 1 where something is, 2 where a source cannot be read'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "key-ring" -d 'Checks a copy of the key ring against the database'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "audit" -d 'Verifies the audit log, shows its heads, drops an old month'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "ledger" -d 'Verifies the ledger: every balance against its entries'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "seal-snapshots" -d 'Seals stored snapshots that an operator vouches for: after an upgrade from a release without seals, or after a refused snapshot'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "node-ca" -d 'Prints the authorities of node certificates, PEM, for the proxies in front of the node API (deploy/ingress)'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "nats-permissions" -d 'Prints what a member\'s NATS user may publish and subscribe to, in the format of the server\'s configuration'
complete -c gpuaas -n "__fish_gpuaas_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand serve" -l roles -d 'All, or any of api, node-api, terminal-gateway, entities, billing, provisioning, outbox-relay, notification-relay, webhook, node-log-gateway, with commas' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand serve" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand config" -l check -d 'Check the settings of this environment file, and the files that they name; nothing is connected to. Variables that the file does not set are taken from this command\'s environment; kek, tls.pem and tls.key beside the file are taken as the unit passes them' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand config" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand doctor" -l env-file -d 'The environment file of the service. Without it: that of the Debian package, /etc/gpuaas/gpuaas.env, unless this command\'s environment has SVC_DATABASE_URL. What the file does not set is taken from the environment; kek, tls.pem and tls.key beside it are taken as the unit passes them' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand doctor" -l token-file -d 'A file with an access token of the identity provider: with it the check `access-token` says how this service reads it, or which claim and setting refuse it' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand doctor" -l output -r -f -a "text\t''
json\t''"
complete -c gpuaas -n "__fish_gpuaas_using_subcommand doctor" -l only -d 'One check alone' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand doctor" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l env-file -d 'The environment file of the service, as for `gpuaas doctor`' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l output -d 'The archive. Without it: gpuaas-support-TIME.tar.gz in this folder. A file that exists is not overwritten. `-` is standard output, where this user may write no file, as in a pod' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l token-file -d 'A file with an access token of an administrator: with it the supervision tree and the members are asked of the public API' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l log-file -d 'A file with the service\'s log, in place of the journal of its unit; its end is taken. `-` is standard input' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l unit -d 'The unit whose journal is taken' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l log-hours -d 'How much of the log is taken, in hours' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l max-mib -d 'The bound on the whole content, in MiB, before compression' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l timeout-seconds -d 'The bound on the time to collect it, in seconds' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l anonymous -d 'Replace names, e-mail addresses, ids, hosts and addresses, the same one always by the same text'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -l database-only -d 'What Postgres has, and the names in it, without pseudonyms: for the command of another user, which goes on with it'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand support-bundle" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand migrate" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand migrate" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand migrate" -l plan -d 'Print what would be applied, and change nothing'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand migrate" -l expand -d 'Leave contracts out, so that the release before can still be started. An empty database gets all migrations'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand migrate" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand retention" -l disk-bytes -d 'The size in bytes of the file system with Postgres\' data, where that is not on this machine or its folder cannot be seen' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand retention" -l output -r -f -a "text\t''
json\t''"
complete -c gpuaas -n "__fish_gpuaas_using_subcommand retention" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand retention" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand retention" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand begin-incarnation" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand begin-incarnation" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand begin-incarnation" -l force -d 'Begin one even where nothing looks restored, or where NATS has the marks of another cluster'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand begin-incarnation" -l without-nats -d 'Do not look on NATS for members that still run on another database'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand begin-incarnation" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand recover-report" -l nats-url -d 'A user of NATS who may read streams; members\' own may not' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand recover-report" -l nodes -d 'Copies of nodes\' state: a folder for each node, with the folder `allocations` of /var/lib/gpuaas-agent in it' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand recover-report" -l output -r -f -a "text\t''
json\t''"
complete -c gpuaas -n "__fish_gpuaas_using_subcommand recover-report" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand recover-report" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand recover-report" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and not __fish_seen_subcommand_from check help" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and not __fish_seen_subcommand_from check help" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and not __fish_seen_subcommand_from check help" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and not __fish_seen_subcommand_from check help" -f -a "check" -d 'Opens what the database has sealed, and prints each key with its fingerprint and the number of values that are sealed under it. Exits with 0 where the key ring fits, and with 78 where it does not'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and not __fish_seen_subcommand_from check help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and __fish_seen_subcommand_from check" -l kek-file -d 'The key ring, or a copy of it' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and __fish_seen_subcommand_from check" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and __fish_seen_subcommand_from check" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and __fish_seen_subcommand_from check" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and __fish_seen_subcommand_from help" -f -a "check" -d 'Opens what the database has sealed, and prints each key with its fingerprint and the number of values that are sealed under it. Exits with 0 where the key ring fits, and with 78 where it does not'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand key-ring; and __fish_seen_subcommand_from help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -l kek-file -d 'The key ring that opens the audit key' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -f -a "verify" -d 'Recomputes every chain. Exits with 0 where all is well, with 1 where something is wrong, with 2 where that is not known'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -f -a "heads" -d 'Shows the newest signed head of every shard, one JSON a line: keep them where operators of this service cannot change them'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -f -a "key" -d 'Shows the public key that verifies heads'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -f -a "forget" -d 'Drops a past month, after signing a checkpoint for each chain'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and not __fish_seen_subcommand_from verify heads key forget help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l shard -d 'This shard alone (0 to 255); may be given several times' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l public-key -d 'Verify signatures by this public key in place of the key ring\'s; may be given several times' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l heads -d 'A file of heads that were kept elsewhere, as `gpuaas audit heads` writes them' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l unsealed-after-seconds -d 'How long a row may wait for its seal' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l nats-url -d 'The NATS server with the archive of heads; without it the database is compared with --heads alone' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l nats-ca -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l nats-stream-replicas -d 'The copies of the archive' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l kek-file -d 'The key ring that opens the audit key' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -l json -d 'Answer in JSON'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from verify" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from heads" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from heads" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from heads" -l kek-file -d 'The key ring that opens the audit key' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from heads" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from key" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from key" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from key" -l kek-file -d 'The key ring that opens the audit key' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from key" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from forget" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from forget" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from forget" -l kek-file -d 'The key ring that opens the audit key' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from forget" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from help" -f -a "verify" -d 'Recomputes every chain. Exits with 0 where all is well, with 1 where something is wrong, with 2 where that is not known'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from help" -f -a "heads" -d 'Shows the newest signed head of every shard, one JSON a line: keep them where operators of this service cannot change them'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from help" -f -a "key" -d 'Shows the public key that verifies heads'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from help" -f -a "forget" -d 'Drops a past month, after signing a checkpoint for each chain'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand audit; and __fish_seen_subcommand_from help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and not __fish_seen_subcommand_from verify help" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and not __fish_seen_subcommand_from verify help" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and not __fish_seen_subcommand_from verify help" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and not __fish_seen_subcommand_from verify help" -f -a "verify" -d 'Adds up every account\'s postings, and compares the sums with the accounts\' balances. Exits with 0 where they agree, with 1 where they do not, with 2 where that is not known'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and not __fish_seen_subcommand_from verify help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and __fish_seen_subcommand_from verify" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and __fish_seen_subcommand_from verify" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and __fish_seen_subcommand_from verify" -l json -d 'Answer in JSON'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and __fish_seen_subcommand_from verify" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and __fish_seen_subcommand_from help" -f -a "verify" -d 'Adds up every account\'s postings, and compares the sums with the accounts\' balances. Exits with 0 where they agree, with 1 where they do not, with 2 where that is not known'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand ledger; and __fish_seen_subcommand_from help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand seal-snapshots" -l entity -d 'The one entity that an operator has inspected after its row was refused. Without it: every entity without a seal, as after an upgrade from a release that does not seal; one whose seal does not match is left as it is' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand seal-snapshots" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand seal-snapshots" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand seal-snapshots" -l kek-file -d 'The key ring that seals secrets at rest' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand seal-snapshots" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand node-ca" -l database-url -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand node-ca" -l database-ca -d 'The authorities that the database\'s certificate is verified with' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand node-ca" -l kek-file -d 'The key ring' -r -F
complete -c gpuaas -n "__fish_gpuaas_using_subcommand node-ca" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand nats-permissions" -l name -d 'The name of the user, as it is in SVC_NATS_URL' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand nats-permissions" -l roles -d 'All, or any of api, node-api, terminal-gateway, entities, billing, provisioning, outbox-relay, notification-relay, webhook, node-log-gateway, with commas' -r
complete -c gpuaas -n "__fish_gpuaas_using_subcommand nats-permissions" -s h -l help -d 'Print help'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "serve" -d 'Runs the control plane; set up by SVC_* variables'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "config" -d 'Checks the settings of an environment file: unknown names, wrong and missing values, all at once. Exits with 0 or 78'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "doctor" -d 'Looks at everything that a replica needs (settings, certificates, Postgres, NATS, identity provider, ports, limits), and says what to do about what is wrong. Changes nothing. Exits with 0 where nothing is wrong, with 1 for warnings, with 2 for errors'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "support-bundle" -d 'Collects what is needed to diagnose a fault from elsewhere into one archive, without secrets: findings of doctor, settings, supervision tree, overdue and parked entities, metrics, the log, Postgres\' locks, streams. Works while the service, Postgres or NATS do not'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "migrate" -d 'Brings the database to this release\'s schema, apart from serving: expand before members of this release start, contract once none of an earlier one is left. Exits with 0 where that is done, and with 75 where a contract waits for members of an earlier release'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "retention" -d 'Shows how large the tables of the database are and grow, what the retention policies keep, what their next run removes, and in how many days the disk is full. Changes nothing'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "begin-incarnation" -d 'Starts a new incarnation of a database that was restored from a backup; run it once, while no member runs. What the backup has lost must not be taken for something new. It releases every shard and raises every epoch. Where nothing was restored, it changes nothing'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "recover-report" -d 'Lists what a database that was restored from a backup has lost, by what NATS, the nodes and the payment processor have: tenants without allocation, money without posting, tokens spent. Exits with 0 where nothing is lost, 1 where something is, 2 where a source cannot be read'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "key-ring" -d 'Checks a copy of the key ring against the database'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "audit" -d 'Verifies the audit log, shows its heads, drops an old month'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "ledger" -d 'Verifies the ledger: every balance against its entries'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "seal-snapshots" -d 'Seals stored snapshots that an operator vouches for: after an upgrade from a release without seals, or after a refused snapshot'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "node-ca" -d 'Prints the authorities of node certificates, PEM, for the proxies in front of the node API (deploy/ingress)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "nats-permissions" -d 'Prints what a member\'s NATS user may publish and subscribe to, in the format of the server\'s configuration'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and not __fish_seen_subcommand_from serve config doctor support-bundle migrate retention begin-incarnation recover-report key-ring audit ledger seal-snapshots node-ca nats-permissions help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and __fish_seen_subcommand_from key-ring" -f -a "check" -d 'Opens what the database has sealed, and prints each key with its fingerprint and the number of values that are sealed under it. Exits with 0 where the key ring fits, and with 78 where it does not'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and __fish_seen_subcommand_from audit" -f -a "verify" -d 'Recomputes every chain. Exits with 0 where all is well, with 1 where something is wrong, with 2 where that is not known'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and __fish_seen_subcommand_from audit" -f -a "heads" -d 'Shows the newest signed head of every shard, one JSON a line: keep them where operators of this service cannot change them'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and __fish_seen_subcommand_from audit" -f -a "key" -d 'Shows the public key that verifies heads'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and __fish_seen_subcommand_from audit" -f -a "forget" -d 'Drops a past month, after signing a checkpoint for each chain'
complete -c gpuaas -n "__fish_gpuaas_using_subcommand help; and __fish_seen_subcommand_from ledger" -f -a "verify" -d 'Adds up every account\'s postings, and compares the sums with the accounts\' balances. Exits with 0 where they agree, with 1 where they do not, with 2 where that is not known'
