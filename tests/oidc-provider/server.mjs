// An OpenID provider of npm's oidc-provider, for one test. Its argument is the folder in which that is installed. Prints its issuer when
// it listens, and ends with its standard input.
import { once } from 'node:events';
import { createServer } from 'node:http';
import { webcrypto } from 'node:crypto';
import { pathToFileURL } from 'node:url';

// Node.js 18 has it under another name.
globalThis.crypto ??= webcrypto;
const { default: Provider } = await import(pathToFileURL(`${process.argv[2]}/node_modules/oidc-provider/lib/index.js`));

const audience = 'https://gpu.example/api';
const newKey = async (kid) => {
    const pair = await crypto.subtle.generateKey({ name: 'ECDSA', namedCurve: 'P-256' }, true, ['sign', 'verify']);
    const { kty, crv, x, y, d } = await crypto.subtle.exportKey('jwk', pair.privateKey);
    return { kty, crv, x, y, d, kid, use: 'sig', alg: 'ES256' };
};

const server = createServer();
server.listen(0, '127.0.0.1');
await once(server, 'listening');
const issuer = `http://127.0.0.1:${server.address().port}`;

const provider = new Provider(issuer, {
    jwks: { keys: [await newKey('of-a-foreign-provider')] },
    cookies: { keys: ['cookies of one test'] },
    clients: [{
        client_id: 'browser',
        application_type: 'native',
        token_endpoint_auth_method: 'none',
        redirect_uris: ['http://127.0.0.1/back'],
        grant_types: ['authorization_code'],
        response_types: ['code'],
        id_token_signed_response_alg: 'ES256',
    }, {
        // The command line: another port each time (RFC 8252), or a device code (RFC 8628).
        client_id: 'gpuctl',
        application_type: 'native',
        token_endpoint_auth_method: 'none',
        redirect_uris: ['http://127.0.0.1/callback'],
        grant_types: ['authorization_code', 'refresh_token', 'urn:ietf:params:oauth:grant-type:device_code'],
        response_types: ['code'],
        id_token_signed_response_alg: 'ES256',
    }, {
        // The web console: a confidential client.
        client_id: 'console',
        client_secret: 'a secret of one test, long enough for any of them',
        redirect_uris: ['https://console.example/console/callback'],
        post_logout_redirect_uris: ['https://console.example/console/'],
        grant_types: ['authorization_code', 'refresh_token'],
        response_types: ['code'],
        id_token_signed_response_alg: 'ES256',
    }],
    pkce: { required: () => true },
    // Claims in other places than Keycloak has them: one named by a URL, others nested.
    extraTokenClaims: (_, token) => ({
        'https://gpu.example/roles': token.accountId?.startsWith('admin') ? ['user', 'admin'] : ['user'],
        uid: `foreign:${token.accountId}`,
        tenancy: { org: 'acme', project: 'p1' },
    }),
    findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
    features: {
        devInteractions: { enabled: true },
        deviceFlow: { enabled: true },
        revocation: { enabled: true },
        resourceIndicators: {
            enabled: true,
            defaultResource: () => audience,
            useGrantedResource: () => true,
            getResourceServerInfo: (_, indicator, client) => ({
                audience: indicator,
                scope: 'gpu',
                accessTokenTTL: client.clientId === 'gpuctl' ? 23 : 600,
                accessTokenFormat: 'jwt',
                jwt: { sign: { alg: 'ES256' } },
            }),
        },
    },
});
server.on('request', provider.callback());
process.stdin.on('end', () => process.exit(0)).resume();
console.log(issuer);
