// What a user has: money, and what runs; for a new user, the steps to the first shell.
import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { balanceQuery, rentedQuery } from "../api/queries.ts";
import type { Schemas } from "../api/client.ts";
import { money, moneyMicro } from "../format/money.ts";
import { count } from "../format/text.ts";
import { useMay, useMe } from "../session/me.ts";
import { FirstSteps } from "./first-steps.tsx";
import { AllocationTable } from "./allocation-table.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { When } from "../ui/time.tsx";

/** As many allocations as the page shows. */
const SHOWN = 10;

export default function OverviewPage() {
  const balance = useQuery(balanceQuery);
  const rented = useQuery(rentedQuery(useMe().user_id));
  const may = useMay();
  return (
    <>
      <Head title="Overview" age={<Age query={rented} />}>
        {may("rent") && (
          <Link className="button primary" to="/catalog">
            Rent GPUs
          </Link>
        )}
      </Head>
      <FirstSteps account={balance.data} />
      <Loaded query={balance}>{(account) => <Balance account={account} />}</Loaded>
      {balance.data && (
        <p className="soft page-note">
          The balance: <Age query={balance} polled />
        </p>
      )}
      <Card title="Allocations" actions={<Link to="/allocations">All allocations</Link>}>
        <Loaded query={rented}>
          {({ items, isPartial }) => (
            <>
              <AllocationTable
                rows={items.slice(0, SHOWN)}
                none={
                  <p>
                    Nothing is rented. The <Link to="/catalog">catalog</Link> shows what is free.
                  </p>
                }
              />
              {(isPartial || items.length > SHOWN) && <p className="soft">More are rented than are shown here.</p>}
            </>
          )}
        </Loaded>
      </Card>
    </>
  );
}

export function Balance({ account }: { account: Schemas["BillingAccount"] }) {
  const { currency } = account;
  return (
    <>
      {account.release_at && (
        <p className="banner" data-tone="bad" role="alert">
          <span>
            The balance is used up. What runs is released <When at={account.release_at} />.
          </span>
          <Link className="button primary" to="/money">
            Top up
          </Link>
        </p>
      )}
      <dl className="numbers">
        <div>
          <dt>Available</dt>
          <dd data-tone={account.is_low ? "bad" : undefined}>{money(account.available_minor, currency)}</dd>
          <dd className="soft">{account.is_low ? "below your warning" : `balance ${money(account.balance_minor, currency)}`}</dd>
        </div>
        <div>
          <dt>Cost per hour</dt>
          <dd>{money(account.burn_minor_per_hour, currency)}</dd>
          <dd className="soft">{count(account.running)} running</dd>
        </div>
        <div>
          <dt>Lasts</dt>
          <dd>{account.lasts_until ? <When at={account.lasts_until} /> : "–"}</dd>
          <dd className="soft">{account.lasts_until ? "at the current cost" : "nothing is spent"}</dd>
        </div>
        <div>
          <dt>On hold</dt>
          <dd>{money(account.held_minor, currency)}</dd>
          <dd className="soft">for what is starting{currency && ` · next window ${moneyMicro(account.next_window_micro, currency)}`}</dd>
        </div>
      </dl>
    </>
  );
}
